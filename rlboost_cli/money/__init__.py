"""What a run cost and what machines cost, for a person and for a spreadsheet."""
