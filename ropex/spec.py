"""What a conversion is, as a value: it resolves the user's wishes once and is written into every output."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ropex.config import ADAROPE, Rope, backbone_type, rope_of
from ropex.errors import CheckpointError, OptionError
from ropex.families import Pairing
from ropex.tables import METHODS, Table, method, resolve_params, table, two_lengths

if TYPE_CHECKING:
    import torch

Length = Literal["position", "sequence"]


@dataclass(frozen=True)
class RotarySpec:
    """A method with everything that its table and scale depend on.

    method: a name in METHODS. init: for adarope, the method whose table and scale it starts from.
    factor: how far beyond the window. window: L_ref (and RoPE-ID's L_train), tokens. target: tokens claimed.
    params: the tunables of the method or of init. ada_freq, ada_scale: which parts are trained.
    share_heads: one table and one scale for the whole model. length: what L is in the scale.
    pairing: which channels turn together in the converted weights.
    sliding: layers of sliding-window attention that have a table of their own are converted too.
    """

    method: str
    window: int
    target: int
    factor: float = 1.0
    init: str = "rope"
    params: dict[str, Any] = field(default_factory=dict)
    ada_freq: bool = True
    ada_scale: bool = True
    share_heads: bool = False
    length: Length = "position"
    pairing: Pairing = "half-split"
    sliding: bool = False

    @property
    def table_method(self) -> str:
        """The method whose table stands at the start."""
        return self.init if self.method == ADAROPE else self.method

    @property
    def learned(self) -> bool:
        return self.method == ADAROPE

    @property
    def shared(self) -> bool:
        """True when all heads of all layers turn alike."""
        return self.share_heads or not self.learned

    @property
    def log_coef(self) -> float:
        """c of the scale (1 + c ln max(1, L/window))^2; 0 where the method has none."""
        return method(self.table_method).log_coef

    @property
    def identity(self) -> bool:
        """True when a fresh conversion must give the parent's logits."""
        return self.table_method == "rope" and self.params.get("table") is None

    def table(self, rope: Rope) -> Table:
        """The base table theta0 [F] with its attention factor and scale."""
        return table(self.table_method, rope, self.params)

    def layers(self, rope: Rope) -> dict[int, Rope]:
        """The layers that are converted, in order, each with the rope that turns it."""
        found = dict.fromkeys(rope.turning, rope)
        if self.sliding and rope.local is not None:
            found |= dict.fromkeys(rope.local.turning, rope.local)
        return dict(sorted(found.items()))

    def fresh(self, rope: Rope) -> "dict[str, torch.Tensor]":
        """One layer's rotary tensors right after conversion, float32: theta0 [F], delta [Hkv, F], tau and gamma [Hq]
        (one row where heads share)."""
        import torch

        found = self.table(rope)
        queries, kvs = (1, 1) if self.shared else (rope.heads, rope.kv_heads)
        return {
            "theta0": found.theta,
            "delta": torch.zeros(kvs, rope.pairs),
            "tau": torch.full((queries,), self.turn_scale(rope) / found.attention_factor**2),
            "gamma": torch.zeros(queries),
        }

    def turn_scale(self, rope: Rope) -> float:
        """m^2 where only a part of the head turns: transformers then scales that part alone. Else 1: tau has it."""
        return 1.0 if rope.rotary_dim == rope.head_dim else self.table(rope).attention_factor ** 2

    def block(self) -> dict[str, Any]:
        """What config.json keeps under our key."""
        return asdict(self)


def make_spec(
    name: str,
    rope: Rope,
    *,
    factor: float | None = None,
    target: int | None = None,
    init: str | None = None,
    params: Mapping[str, Any] | None = None,
    ada_freq: bool = True,
    ada_scale: bool = True,
    share_heads: bool = False,
    length: Length = "position",
    pairing: Pairing | None = None,
    sliding: bool = False,
) -> RotarySpec:
    """Resolve what the user asked for against a checkpoint. factor and target (tokens) determine each other.
    pairing: of the converted weights; the checkpoint's own unless given. sliding: see RotarySpec."""
    method(name)
    if sliding and rope.local is None:
        raise OptionError("--sliding-layers: no layer of this checkpoint has a table for sliding attention alone")
    if share_heads and name != ADAROPE:
        raise OptionError(f"--share-heads is for adarope: '{name}' has one table for all heads")
    if sliding and share_heads:
        raise OptionError("--share-heads makes one table of all, and sliding layers have one of their own: give one")
    if init is not None and name != ADAROPE:
        raise OptionError(f"--init is for adarope, which starts from another method's table; '{name}' is a table")
    if init is not None and (init == ADAROPE or init not in METHODS):
        raise OptionError(f"--init {init}: choose one of {', '.join(m for m in METHODS if m != ADAROPE)}")
    if not (ada_freq or ada_scale) and name == ADAROPE:
        raise OptionError("adarope without AdaFreq and without AdaScale has nothing to learn: leave one switch out")
    window = rope.window
    if target is not None and target < window:
        raise OptionError(f"target {target} is below the native window of {window}: give a longer one")
    if factor is not None and target is not None and round(window * factor) != target:
        raise OptionError(
            f"factor {factor:g} of the native window {window} is {round(window * factor)}, not {target}: give one"
        )
    if factor is None:
        factor = target / window if target is not None else 1.0
    start = (init or "rope") if name == ADAROPE else name
    params = dict(params or {})
    pairing = pairing or rope.pairing
    if start == "rope" and (name == ADAROPE or pairing != rope.family.pairing):
        if rope.rope_type == "dynamic":
            raise OptionError(
                "the checkpoint's 'dynamic' changes its table with every length, and a head has one table: start from "
                "a checkpoint whose table stays"
            )
        if two_lengths(rope):  # a head has one table at every length: the one for long inputs, unless asked
            params.setdefault("table", "long")
    if rope.local is not None and pairing != rope.family.pairing and not sliding:
        if start != "rope":
            raise OptionError(f"in {pairing} pairing every layer is converted: give --sliding-layers with '{start}'")
        sliding = True
    resolved = resolve_params(start, rope, factor, params)
    spec = RotarySpec(
        name,
        window,
        target or max(round(window * factor), rope.max_position_embeddings if factor == 1 else 0),
        factor,
        init or "rope",
        resolved,
        ada_freq,
        ada_scale,
        share_heads,
        length,
        pairing,
        sliding,
    )
    if start in ("pi", "ntk", "yarn", "llama3") and factor == 1:
        raise OptionError(
            f"'{start}' stretches by a factor: give a factor (--factor 2, or PATH@{start}:2) or --target (such as 16k)"
        )
    return spec


def spec_of(config: dict[str, Any]) -> RotarySpec | None:
    """The spec that a per-head checkpoint's config carries, or None for a stock one."""
    block = config.get(ADAROPE)
    if block is None:
        return None
    known = {k: v for k, v in block.items() if k in RotarySpec.__dataclass_fields__}
    try:
        return RotarySpec(**known)
    except TypeError as error:
        raise CheckpointError(f"config.json: the '{ADAROPE}' block is incomplete ({error})") from None


def method_name(config: dict[str, Any]) -> str:
    """The rotary method of a checkpoint in our terms, from its config."""
    spec = spec_of(config)
    if spec is not None:
        return spec.method
    backbone_type(config)
    stock = rope_of(config).rope_type
    return {"default": "rope", "linear": "pi"}.get(stock, stock)
