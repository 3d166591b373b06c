"""What the tests of readers share."""

import json

from transformers import AutoModelForCausalLM

from ropex.convert.source import every
from ropex.convert.weights import write_shards


def built(source, folder):
    """The model that transformers makes of what a source gives."""
    folder.mkdir()
    write_shards(source.tensors(every), folder, 10**9, {})
    (folder / "config.json").write_text(json.dumps(source.config))
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()
