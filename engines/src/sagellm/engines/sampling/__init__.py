"""From logits to tokens: parameters, penalties, filters, draws, log-probabilities and stops."""
