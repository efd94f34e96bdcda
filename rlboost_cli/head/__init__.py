"""A run whose head is another machine: everything is brought there, asked there and looked at from here."""
