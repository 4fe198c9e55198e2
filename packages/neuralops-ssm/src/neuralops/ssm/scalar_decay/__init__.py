"""The matrix-state scan whose decay is one number per token and head, shared by two operators."""
