"""`sage llm chat`: a conversation with a model in this process."""
