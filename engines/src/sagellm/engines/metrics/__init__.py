"""Every metric that the project reports, as a formula with units. Each docstring repeats its formula."""
