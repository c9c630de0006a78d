"""Records what an engine serves as a trace, which `simulate` and the predictors read."""
