"""What `doctor` examines, one file per subject. Each examination returns a `Section`."""
