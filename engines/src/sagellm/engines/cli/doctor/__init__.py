"""What `doctor` examines, one file a subject. Each examination returns a `Section`."""
