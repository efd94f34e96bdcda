"""Parts of the supervisor: what it runs, how it holds a process, how it asks the coordinator to end."""
