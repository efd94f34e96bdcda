"""What can be wrong with a job file: its YAML (`tree`), its shape (`shape`), what it names (`disk`)."""
