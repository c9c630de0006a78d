"""Structured output: the grammars of xgrammar, compiled in a process of their own."""
