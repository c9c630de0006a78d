"""`sage llm engine`: engines that run in their own processes."""
