"""One table of tolerances. A test that needs a looser one has found something."""

LOGITS = 1e-4  # float32 logits of one model computed two ways
STOCK = 1e-3  # our YaRN against transformers' own: the attention factor sits on q alone instead of on q and k
ANGLE_SLOW, ANGLE_FAST = 1e-3, 8e-3  # radians at position 131,072 against float64: slow pairs, and float32's rounding
NORM = 1e-5  # relative, a rotated vector's norm
