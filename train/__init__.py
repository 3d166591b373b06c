"""Two-stage extension training: data windows, the stages of a strategy, and a trainer whose runs resume exactly."""
