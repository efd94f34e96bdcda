"""What a launch will take and cost, before it happens."""
