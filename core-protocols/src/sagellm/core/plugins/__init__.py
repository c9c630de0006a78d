"""How packages offer implementations and how an engine finds them."""
