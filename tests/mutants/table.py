"""Realistic faults: ``(file, text that is there once, what replaces it, arguments of pytest)``."""

# ruff: noqa: E501 (code as it is there)

ORDER = "tests/attention/test_order.py"
FUZZ = "tests/attention/test_fuzz.py"
MASKS = "tests/attention/test_masks.py"
ERRORS = "tests/attention/test_errors.py"
DROPOUT = "tests/attention/test_dropout.py"
FUNCTIONS = "tests/attention/test_functions.py"
PADDING = "tests/attention/test_padding.py"
TRANSFORMS = "tests/attention/test_transforms.py"
RING = "tests/ring/test_ring.py"
SCHEDULE = "tests/ring/test_schedule.py"
ROUTE = "tests/ring/test_route.py"
LOCAL = "tests/pallas_kernels/test_local_attention.py"
BOUNDS = "tests/pallas_kernels/test_bounds.py"
INTERFACE = "tests/pallas_kernels/test_local_interface.py"
SCHEDULER = "tests/pallas_kernels/test_tile_scheduler.py"
SM80 = "tests/pallas_kernels/test_sm80_interpreted.py"
SM90 = "tests/pallas_kernels/test_sm90_interpreted.py"
CALL = "burst_jax/attention/call.py"
INPUTS = "burst_jax/attention/inputs.py"
RULES = "burst_jax/attention/validation.py"
CHECKS = "burst_jax/attention/order.py"
VJP = "burst_jax/ring/vjp.py"
XLA = "pallas_kernels/xla.py"
SCORE = "pallas_kernels/score.py"
MASK = "pallas_kernels/mask.py"
TILES = "pallas_kernels/bounds.py"

MUTANTS = [
    # --- burst_jax/attention
    (CHECKS, "& (segments[:, 1:] != 0)", "", ORDER),
    (CHECKS, "same = (segment == segments[:, samples.before_in_text]) & (segment != 0)",
     "same = segment == segments[:, samples.before_in_text]", ORDER),
    (CHECKS, "& (segment[1:, 0] != 0)", "", ORDER),
    (CHECKS, "== positions[:, samples.before_in_array] + 1", "> positions[:, samples.before_in_array]",
     ORDER),
    (CALL, "right = None if arguments.prefix_lengths is not None else 0", "right = 0", FUZZ),
    (CALL, "right = 0 if per_sequence and arguments.prefix_lengths is None else None",
     "right = None", FUZZ),
    (CALL, "devices = request.token_devices if local else 1", "devices = 1", MASKS),
    (CALL, "(query.shape[0], query.shape[2]), jnp.uint32", "(1, query.shape[2]), jnp.uint32", DROPOUT),
    (CALL, "None if own_positions else check", "check", f"{MASKS} {FUZZ}"),
    (INPUTS, "jnp.where(positions() < lengths[:, None], ids, 0)",
     "jnp.where(positions() <= lengths[:, None], ids, 0)", f"{MASKS} {FUZZ}"),
    (INPUTS, "functools.reduce(jnp.minimum, ends)", "functools.reduce(jnp.maximum, ends)",
     f"{MASKS} {FUZZ}"),
    (INPUTS, "jnp.maximum(positions() + 1, arrays", "jnp.maximum(positions(), arrays",
     f"{MASKS} {FUZZ}"),
    (INPUTS, "not offset.ndim else offset[:, None]", "not offset.ndim else offset[:1, None]",
     f"{MASKS} {FUZZ}"),
    (INPUTS, "KVSide(key, arrays[\"value\"], arrays.get(\"key_value_positions\"), kv_ids)",
     "KVSide(key, arrays[\"value\"], None, kv_ids)", f"{MASKS} {FUZZ}"),
    (RULES, "_MAX_POSITION = 2**30", "_MAX_POSITION = 2**31", ERRORS),
    (RULES, "xp.minimum(x, xp.asarray(_INT32.max, x.dtype))", "x", MASKS),
    (RULES, "if tuple(x.shape) not in shapes.values():", "if x.ndim not in map(len, shapes.values()):",
     ERRORS),
    ("burst_jax/attention/padding.py", "jnp.ones(arrays[side].shape[:2], jnp.int32)",
     "jnp.ones(arrays[\"query\"].shape[:2], jnp.int32)", "tests/attention/test_pad_argument.py"),
    ("burst_jax/attention/padding.py", "return result[:, :length]", "return result",
     "tests/attention/test_pad_argument.py"),
    ("burst_jax/attention/merging.py", "more.astype(jnp.float32), more_lse)", "more, more_lse)",
     "tests/attention/test_one_device.py"),
    ("burst_jax/attention/merging.py", "return merged[0].astype(out.dtype), merged[1]",
     "return merged[0], merged[1]", "tests/attention/test_one_device.py"),
    # --- burst_jax/ring and layouts
    (VJP, "return jnp.where(live, x, jnp.zeros((), x.dtype))", "return x", PADDING),
    (VJP, "sinks, slopes, seeds = jax.tree.map(own, (sinks, slopes, seeds))",
     "sinks, slopes = jax.tree.map(own, (sinks, slopes))", f"{DROPOUT} {FUZZ}"),
    (VJP, "indices._replace(head=own(indices.head))", "indices", f"{FUNCTIONS} {FUZZ}"),
    (VJP, "jnp.zeros((1 + sum(2 ** names.index(name)", "jnp.zeros((1 + sum(names.index(name)",
     "tests/attention/test_request.py"),
    ("burst_jax/ring/ulysses.py", "jnp.repeat(x, copies, axis=heads)",
     "jnp.concatenate([x] * copies, axis=heads)", f"{RING} {FUZZ}"),
    ("burst_jax/ring/ulysses.py", ".sum(heads + 1).astype(dtype)", ".mean(heads + 1).astype(dtype)",
     f"{RING} {FUZZ}"),
    ("burst_jax/ring/ulysses.py", "lax.axis_index(axis_name) * count", "0 * count",
     "tests/attention/test_request.py"),
    ("burst_jax/ring/rotation.py", "return \"rotate_kv\" if kv <= query", "return \"rotate_kv\" if kv >= query",
     "tests/ring"),
    ("burst_jax/ring/rotation.py", "+ 2 * 4)", "+ 4)", "tests/ring"),
    ("burst_jax/ring/backward.py", "if step.launches[-1].sends or any(send.what == \"block\" for send in step.sends):",
     "if step.launches[-1].sends:", "tests/ring"),
    ("burst_jax/ring/forward.py", "if launch.sends or step.sends:", "if launch.sends:",
     "tests/ring tests/parallel"),
    ("burst_jax/ring/forward.py", "return vary((out, lse), varying_axes(inputs))", "return out, lse",
     f"{RING} {TRANSFORMS}"),
    ("burst_jax/ring/route.py", "lax.axis_index(axis) - stop[i] + size", "lax.axis_index(axis) + stop[i] + size",
     RING),
    ("burst_jax/layouts/permutation.py", "(2 * num_shards - 1 - shard) * half - half",
     "(2 * num_shards - 1 - shard) * half", f"tests/layouts {RING}"),
    ("burst_jax/layouts/permutation.py", "stripe * shard + index + (num_shards - 1)",
     "stripe * shard + index + num_shards", f"tests/layouts {RING}"),
    # --- pallas_kernels
    (SCORE, "ds = jnp.where(weights == 0, jnp.zeros((), ds.dtype), ds * derivative)", "ds = ds * derivative",
     FUNCTIONS),
    (SCORE, "return ds if self.logits_soft_cap is None else ds * (1 - raw * raw)", "return ds",
     f"{LOCAL} {FUZZ}"),
    (SCORE, "{\"alibi_slopes\": -ds * _distance", "{\"alibi_slopes\": ds * _distance", f"{LOCAL} {FUZZ}"),
    (SCORE, "jnp.where(lse == -jnp.inf, 0, lse))\n    return", "lse)\n    return", f"{LOCAL} {FUZZ}"),
    (XLA, "beyond=jnp.inf", "beyond=0", f"{LOCAL} {FUZZ}"),
    (XLA, "if self.padded != self.length:", "if False:", f"{LOCAL} {FUZZ}"),
    (XLA, "p = jnp.exp(keys.logits(queries, raw, j) - queries[\"lse\"][..., None])",
     "p = jnp.exp(keys.spec.score.modified(raw, keys.places(queries, j)) - queries[\"lse\"][..., None])",
     LOCAL),
    (XLA, "    kept = keys.dropped(queries, p, j).astype(v.dtype)\n    new_dv",
     "    kept = p.astype(v.dtype)\n    new_dv", DROPOUT),
    (XLA, "return new_dq if dq is None else dq + new_dq", "return new_dq", RING),
    (MASK, "tests.append(q_positions - kv_positions <= self.left)",
     "tests.append(q_positions - kv_positions < self.left)", f"{LOCAL} {FUZZ}"),
    (MASK, "& (q_segment_ids != 0))", ")", f"{LOCAL} {PADDING}"),
    (MASK, "operator.lt(*_of_one_rank(kv_positions, kv_ends))",
     "operator.le(*_of_one_rank(kv_positions, kv_ends))", f"{MASKS} {FUZZ}"),
    (MASK, "full &= kv_last - q_first <= self.right", "full &= kv_last - q_last <= self.right", BOUNDS),
    (MASK, "possible &= q_first - kv_last <= self.left", "possible &= q_last - kv_last <= self.left",
     BOUNDS),
    (MASK, "full = jnp.zeros_like(full)", "pass", f"{BOUNDS} {FUNCTIONS}"),
    (TILES, "jnp.where((low == high) & (padded == 0), low, 0)", "jnp.where(low == high, low, 0)",
     BOUNDS),
    (TILES, "possible.reshape(by_group).any(2)", "possible.reshape(by_group).all(2)",
     BOUNDS),
    (TILES, "(index < (tiles + 1) // 2) == first", "(index <= (tiles + 1) // 2) == first",
     f"{BOUNDS} tests/ring"),
    ("pallas_kernels/dropout.py", "return 1 / (1 - self.rate)", "return 1.0", DROPOUT),
    ("pallas_kernels/merge.py", "total = jnp.where(empty, jnp.ones_like(total), total)", "",
     "tests/attention/test_merge.py"),
    ("pallas_kernels/softmax.py", "divisor = jnp.where(empty, 1.0, total)", "divisor = total",
     f"{INTERFACE} -k softmax"),
    ("pallas_kernels/softmax.py", "m = jnp.maximum(sink, FLOOR)", "m = sink", f"{INTERFACE} -k softmax"),
    ("pallas_kernels/mosaic/tile_scheduler.py", "index = work_tiles.ctas + scheduler.read(slot, is_producer)",
     "index = scheduler.read(slot, is_producer)", SCHEDULER),
    ("pallas_kernels/mosaic/tile_iterator.py", "i = jnp.where(i >= count, i - count, i)",
     "i = jnp.where(i > count, i - count, i)", SCHEDULER),
    ("pallas_kernels/mosaic/scores.py", "return index < self.static.kv_length - self.first_key",
     "return index <= self.static.kv_length - self.first_key", SM80),
    ("pallas_kernels/mosaic/sm80/backward.py", "before = tiles.masked * groups", "before = tiles.masked",
     SM80),
    ("pallas_kernels/mosaic/sm80/forward.py",
     "softmax.finish(state.m if excess is None else state.m - excess, total)",
     "softmax.finish(state.m, total)", SM80),
    ("pallas_kernels/mosaic/sm90/forward.py", "_wait_for_keys(consumer, step + 1)\n        consumer",
     "consumer", f"{SM90} -k plain"),
    ("pallas_kernels/mosaic/sm90/backward_step.py", "used, dp = p * factors, dp * factors",
     "used = p * factors", f"{SM90} -k block_mask"),
    ("pallas_kernels/mosaic/sm90/shared_memory.py", "pl.ds((self.stages + do_stage) * self.block_q,",
     "pl.ds((self.do_stages + do_stage) * self.block_q,", "tests/pallas_kernels/test_configs.py"),
    # --- layers, models, serving
    ("burst_jax/layers/rope.py", "slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)",
     "slow = (np.arange(head_dim // 2) - low) / (high - low)", "tests/layers"),
    ("burst_jax/layers/nnx_layer.py", "jax.random.fold_in(dropout_key, index)",
     "dropout_key", f"{DROPOUT} tests/layers"),
    ("burst_jax/serving/prompts.py", "not 0 <= ids < vocab_size:", "not 0 <= ids <= vocab_size:",
     "tests/serving/test_serving.py"),
]  # fmt: skip
