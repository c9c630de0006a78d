"""`sage llm engine`: engines that run in processes of their own."""
