"""Task docqa: its task, the readers of documents, and the changes of training pages."""
