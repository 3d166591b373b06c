"""What heads do: measures, classes and pictures of the attention of a checkpoint."""
