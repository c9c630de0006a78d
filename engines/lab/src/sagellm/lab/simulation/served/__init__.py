"""The whole served system in one thread on virtual time, with faults drawn from a seed."""
