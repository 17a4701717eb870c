"""Kernel configs and calls for the interpreted sm90 kernels."""

from __future__ import annotations

from pallas_kernels import mosaic_sm90
from pallas_kernels.mosaic.sm90 import backward_forms as forms
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

CLUSTERS = mosaic_sm90(MosaicConfig(128, 64, 2, cluster=2), MosaicConfig(64, 128, 2))
# The smallest tiles. Lengths are chosen for few steps, with partial tiles on both sides.
KERNELS = mosaic_sm90(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2))
SPLIT = MosaicConfig(128, 64, 2, v_stages=3, split_softmax=True)
# Exponentials of one half of the rows after the other; dQ in register order.
LARGE, LARGE_DETERMINISTIC = (
    mosaic_sm90(SPLIT, MosaicConfig(128, 128, 2), deterministic) for deterministic in (False, True)
)
# The consumers share a producer's work.
SHARED = mosaic_sm90(
    MosaicConfig(128, 64, 2, v_stages=3, producer_warpgroup=False),
    MosaicConfig(64, 128, 3, do_stages=2, producer_warpgroup=False),
)
# The same with a third stage of keys, so that they start copies after a softmax, and large tiles.
SHARED_LARGE = mosaic_sm90(
    MosaicConfig(128, 64, 3, producer_warpgroup=False),
    MosaicConfig(128, 128, 3, do_stages=2, producer_warpgroup=False),
)
# Head dims above 128: consumers with keys of their own, and with keys that they share.
LATENT, WIDE_DETERMINISTIC = (
    mosaic_sm90(
        MosaicConfig(128, forward, 2, split_softmax=forward == 128),
        MosaicConfig(64, form.block_kv, 2, form=form),
        deterministic,
    )
    for forward, form, deterministic in (
        (128, forms.OWN_KEYS, False),
        (112, forms.SHARED_KEYS, True),
    )
)
# The largest forward tiles of such heads, and a backward that supports all terms of the scores.
WIDE = mosaic_sm90(
    MosaicConfig(128, 112, 2, split_softmax=True), MosaicConfig(64, 64, 2, form=forms.SHARED_KEYS)
)
# One consumer accumulates dV, the other dK.
SPLIT_GRADIENTS, SPLIT_DETERMINISTIC = (
    mosaic_sm90(
        MosaicConfig(128, 112, 2),
        MosaicConfig(64, 96, 2, do_stages=1, form=forms.SPLIT),
        deterministic,
    )
    for deterministic in (False, True)
)
# The same without a producer warpgroup.
LATENT_SHARED, WIDE_SHARED = (
    mosaic_sm90(
        MosaicConfig(128, keys, 2, producer_warpgroup=False),
        MosaicConfig(64, form.block_kv, 2, form=form, producer_warpgroup=False),
    )
    for keys, form in ((128, forms.OWN_KEYS), (96, forms.SHARED_KEYS))
)
# dQ in fixed point, with a producer warpgroup and without.
DETERMINISTIC, SHARED_DETERMINISTIC = (
    mosaic_sm90(MosaicConfig(128, 64, 2), config, deterministic=True)
    for config in (
        MosaicConfig(64, 128, 2),
        MosaicConfig(64, 128, 3, do_stages=2, producer_warpgroup=False),
    )
)
NAMES = "mask", "order", "blocks", "heads", "lengths", "head_dim", "dtype", "numbers", "dropout"


def a_case(*levels, **others):
    return dict(zip(NAMES, levels, strict=False)) | others


CASES = {
    # Lengths are padded to multiples of 8.
    "plain": a_case("causal", "contiguous", 1, (2, 1), (133, 197), 32, "bfloat16", "none"),
    "float16": a_case(
        "full", "contiguous", 2, (1, 1), (71, 133), 64, "float16", "both", value_dim=32
    ),
    "cap": a_case(
        "packed_window_cap", "striped", 1, (2, 2), (136, 72), 64, "bfloat16", "both", value_dim=96
    ),
    "cap_functions": a_case(
        "cap", "contiguous", 1, (2, 1), (72, 136), 64, "float16", "slopes", functions="score_mod"
    ),
    # The last queries attend to two tiles of 128 keys: only from the second on is a softmax split.
    "cap_latent": a_case(
        "packed_window_cap", "contiguous", 1, (2, 1), (72, 150), 192, "bfloat16", "slopes", 0.3,
        value_dim=128,
    ),
    # The second shard's keys are all in the future: its work tiles have nothing to visit.
    "slopes": a_case("causal", "contiguous", 2, (2, 1), (64, 136), 64, "bfloat16", "slopes"),
    "shipped": a_case("causal", "zigzag", 1, (1, 1), (200, 136), 64, "bfloat16", "slopes"),
    # dS changes hands while a step's last products run.
    "late": a_case("causal", "contiguous", 1, (2, 1), (133, 197), 128, "bfloat16", "none"),
    "dropout": a_case("causal", "contiguous", 1, (2, 1), (72, 133), 64, "bfloat16", "none", 0.3),
    "late_own_keys": a_case("causal", "contiguous", 1, (1, 1), (133, 197), 128, "bfloat16", "none"),
    # JAX 0.12 has a producer warpgroup in the forward alone, and tiles of 96 keys.
    "unmasked": a_case("full", "contiguous", 1, (1, 1), (133, 197), 128, "bfloat16", "none"),
    # Copies of two heads' queries count from the step before, and start with a rotated tile.
    "counted": a_case("causal", "contiguous", 1, (2, 1), (256, 264), 32, "bfloat16", "none"),
    "shuffled": a_case("causal", "shuffled", 1, (2, 1), (72, 136), 32, "bfloat16", "slopes"),
    # Heads are padded to (32, 48), and to (32, 64) for the backward kernel.
    "kv_bounds": a_case(
        "packed_window_ranges", "striped", 1, (2, 1), (133, 70), 24, "bfloat16", "slopes",
        value_dim=40,
    ),
    # Block-sparse masks, one per head and one for all. Some work tiles have nothing to visit.
    "block_mask": a_case(
        "full", "contiguous", 2, (2, 1), (128, 192), 64, "bfloat16", "none", 0.3,
        table=(64, 64, True),
    ),
    "shared_block_mask": a_case(
        "packed_causal", "zigzag", 1, (2, 1), (256, 256), 32, "float16", "both",
        table=(128, 64, False),
    ),
    # Some warpgroups' queries are of one document, and have intervals of keys.
    "documents": a_case(
        "packed_causal", "contiguous", 2, (1, 1), (264, 200), 64, "bfloat16", "none"
    ),
    # So have some warpgroups' keys in the backward, whose CTAs loop over work tiles, or not.
    "key_intervals": a_case(
        "packed_causal", "contiguous", 1, (2, 1), (264, 200), 128, "bfloat16", "none"
    ),
    "zigzag_intervals": a_case(
        "packed_causal", "zigzag", 2, (2, 1), (264, 200), 128, "bfloat16", "none"
    ),
    # Some warpgroups' tokens are of two documents. A consumer of the backward skips the first step:
    # its keys come after the step's queries.
    "two_intervals": a_case(
        "packed_causal", "contiguous", 1, (1, 1), (328, 328), 128, "bfloat16", "none",
        documents=(100, 130, 98),
    ),
    "latent": a_case(
        "packed_causal", "zigzag", 1, (2, 1), (72, 136), 192, "bfloat16", "slopes", value_dim=128
    ),
    "wide": a_case("packed_window_cap", "striped", 1, (1, 1), (72, 136), 192, "bfloat16", "slopes"),
    # dV and dK in float32, then rounded; and rounded, over several work tiles of a CTA.
    "split": a_case(
        "packed_window_ranges", "striped", 2, (1, 1), (72, 232), 192, "bfloat16", "none"
    ),
    "split_tiles": a_case(
        "packed_causal", "zigzag", 1, (2, 1), (136, 200), 192, "bfloat16", "none"
    ),
    "wide_slopes": a_case("causal", "zigzag", 1, (2, 1), (134, 230), 192, "bfloat16", "both"),
    "tile_mask": a_case(
        "full", "contiguous", 1, (2, 1), (136, 264), 128, "bfloat16", "none", functions="tile_mask"
    ),
    "functions": a_case(
        "ranges", "zigzag", 1, (2, 2), (72, 136), 64, "bfloat16", "slopes", 0.3,
        functions="functions",
    ),
}  # fmt: skip
# Cases that run without a producer warpgroup only.
WITHOUT = "slopes", "block_mask", "shared_block_mask", "shuffled", "late_own_keys", "counted"
RUNS = [
    ("functions", KERNELS),
    ("tile_mask", KERNELS),
    ("dropout", KERNELS),
    ("documents", KERNELS),
    ("key_intervals", KERNELS),
    ("zigzag_intervals", KERNELS),
    ("two_intervals", KERNELS),
    ("cap_functions", KERNELS),
    ("cap_latent", LATENT),
    ("wide_slopes", WIDE),
    ("wide", WIDE_DETERMINISTIC),
    ("split", SPLIT_GRADIENTS),
    ("split_tiles", SPLIT_GRADIENTS),
    ("split_tiles", SPLIT_DETERMINISTIC),
    ("latent", LATENT_SHARED),
    ("wide", WIDE_SHARED),
    ("float16", LARGE),
    *((name, SHARED) for name in WITHOUT),
    # Where heads share keys, a step waits for the next queries before it starts copies.
    ("late", SHARED),
    ("plain", SHARED_LARGE),
    ("kv_bounds", LARGE_DETERMINISTIC),
    ("cap", SHARED_DETERMINISTIC),
    # The shipped tiles of that case are for three consumer warpgroups.
    ("shipped", mosaic_sm90()),
    ("unmasked", mosaic_sm90()),
]
QUICK = "plain", "slopes", "kv_bounds", "block_mask", "functions", "documents"
SUFFIXES = {
    WIDE_DETERMINISTIC: "-deterministic",
    SPLIT_GRADIENTS: "-gradients",
    SPLIT_DETERMINISTIC: "-gradients-deterministic",
    LARGE: "-large-tiles",
    LARGE_DETERMINISTIC: "-large-tiles-deterministic",
    SHARED: "-without-producer",
    LATENT_SHARED: "-without-producer",
    WIDE_SHARED: "-without-producer",
    SHARED_LARGE: "-large-tiles-without-producer",
    SHARED_DETERMINISTIC: "-deterministic-without-producer",
}
PLAIN, SLOPES = CASES["plain"], CASES["slopes"]
