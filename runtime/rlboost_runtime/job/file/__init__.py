"""What can be wrong with a job file: its YAML (`tree`), its shape (`shape`), what it names (`disk`), and the
regions and GPUs that it wants (`places`). Enter at `load.load_job`."""
