"""ropex: convert, extend, measure and export the rotary embedding of language-model checkpoints."""
