"""What a person and a script see of any command: lines, tables, errors, signs of life."""
