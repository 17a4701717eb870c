"""Realistic faults: ``(file, text that is there once, what replaces it, arguments of pytest)``."""

# ruff: noqa: E501 (code as it is there)

ORDER = "tests/attention/test_order.py"
FUZZ = "tests/attention/test_fuzz.py"
MASKS = "tests/attention/test_masks.py"
ERRORS = "tests/attention/test_errors.py"
DROPOUT = "tests/attention/test_dropout.py"
FUNCTIONS = "tests/attention/test_functions.py"
PADDING = "tests/attention/test_padding.py"
RING = "tests/ring/test_ring.py"
SCHEDULE = "tests/ring/test_schedule.py"
ROUTE = "tests/ring/test_route.py"
LOCAL = "tests/pallas_kernels/test_local_attention.py"
BOUNDS = "tests/pallas_kernels/test_bounds.py"
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
    ("burst_jax/ring/local.py", "self.per_head[name] + part if name in self.per_head else part", "part",
     RING),
    ("burst_jax/ring/ulysses.py", "jnp.repeat(x, copies, axis=heads)",
     "jnp.concatenate([x] * copies, axis=heads)", f"{RING} -k nh4"),
    ("burst_jax/ring/ulysses.py", ".sum(heads + 1).astype(dtype)", ".mean(heads + 1).astype(dtype)",
     f"{RING} {FUZZ}"),
    ("burst_jax/ring/ulysses.py", "lax.axis_index(axis_name) * count", "0 * count",
     "tests/attention/test_request.py"),
    ("burst_jax/ring/rotation.py", "return \"rotate_kv\" if kv <= query", "return \"rotate_kv\" if kv >= query",
     ROUTE),
    ("burst_jax/ring/rotation.py", "+ 2 * 4)", "+ 4)", ROUTE),
    ("burst_jax/ring/backward.py", "if step.launches[-1].sends or any(send.what == \"block\" for send in step.sends):",
     "if step.launches[-1].sends:", f"{RING} -k barrier"),
    ("burst_jax/ring/forward.py", "if launch.sends or step.sends:", "if launch.sends:",
     f"{RING} -k barrier"),
    ("burst_jax/ring/forward.py", "return vary((out, lse), varying_axes(inputs))", "return out, lse",
     f"{RING} -k vary"),
    ("burst_jax/ring/schedule.py", "chunks = max(1, len(offsets) - 1)", "chunks = len(offsets)", SCHEDULE),
    ("burst_jax/ring/half_remat.py", "(np.argsort(to) for to in _targets(route.size))",
     "(to for to in _targets(route.size))", "tests/ring/test_half.py"),
    ("burst_jax/ring/route.py", "lax.axis_index(axis) - offset[i] + size", "lax.axis_index(axis) + offset[i] + size",
     ROUTE),
    ("burst_jax/layouts/permutation.py", "(2 * num_shards - 1 - shard) * half - half",
     "(2 * num_shards - 1 - shard) * half", f"tests/layouts {RING}"),
    ("burst_jax/layouts/permutation.py", "stripe * shard + index + (num_shards - 1)",
     "stripe * shard + index + num_shards", f"tests/layouts {RING}"),
    ("burst_jax/layouts/permutation.py", "block // num_shards if whole else math.gcd(stripe, block)",
     "block // num_shards", "tests/layouts"),
    ("burst_jax/layouts/permutation.py", "math.lcm(padded_length(layout, 1, num_shards), int(multiple_of))",
     "padded_length(layout, 1, num_shards) * int(multiple_of)", "tests/layouts"),
    # --- pallas_kernels
    (SCORE, "ds = jnp.where(weights == 0, jnp.zeros((), ds.dtype), ds * derivative)", "ds = ds * derivative",
     FUNCTIONS),
    (SCORE, "return ds if self.logits_soft_cap is None else ds * (1 - raw * raw)", "return ds",
     f"{LOCAL} {FUZZ}"),
    (SCORE, "{\"alibi_slopes\": -ds * _distance", "{\"alibi_slopes\": ds * _distance", f"{LOCAL} {FUZZ}"),
    (SCORE, "return jnp.abs(q_positions", "return (q_positions", f"{LOCAL} {FUZZ}"),
    (SCORE, "jnp.where(lse == -jnp.inf, 0, lse))\n    return", "lse)\n    return", f"{LOCAL} {FUZZ}"),
    (XLA, "beyond=jnp.inf", "beyond=0", f"{LOCAL} {FUZZ}"),
    (XLA, "if self.padded != self.length:", "if False:", f"{LOCAL} {FUZZ}"),
    (XLA, "p = jnp.exp(keys.logits(queries, raw, j) - queries[\"lse\"][..., None])",
     "p = jnp.exp(keys.spec.score.modified(raw, keys.places(queries, j)) - queries[\"lse\"][..., None])",
     LOCAL),
    (XLA, "dp = keys.dropped(queries, _matmul(\"bkgqh,bksh->bkgqs\", queries[\"do\"], v), j)",
     "dp = _matmul(\"bkgqh,bksh->bkgqs\", queries[\"do\"], v)", DROPOUT),
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
    (MASK, "-((base + self.right) // stride)", "-((base + self.right) // stride) + 1", ROUTE),
    (TILES, "jnp.where((low == high) & (padded == 0), low, 0)", "jnp.where(low == high, low, 0)",
     BOUNDS),
    (TILES, "possible.reshape(by_group).any(2)", "possible.reshape(by_group).all(2)",
     f"{MASKS} tests/pallas_kernels/test_tile_lists.py"),
    (TILES, "(index < (tiles + 1) // 2) == first", "(index <= (tiles + 1) // 2) == first",
     f"{BOUNDS} tests/ring"),
    ("pallas_kernels/dropout.py", "return 1 / (1 - self.rate)", "return 1.0", DROPOUT),
    ("pallas_kernels/dropout.py", "seeds ^ _scrambled(q_positions)", "_scrambled(seeds ^ q_positions)",
     DROPOUT),
    ("pallas_kernels/merge.py", "total = jnp.where(empty, jnp.ones_like(total), total)", "",
     "tests/attention/test_merge.py"),
    ("pallas_kernels/softmax.py", "divisor = jnp.where(empty, 1.0, total)", "divisor = total",
     "tests/pallas_kernels/test_softmax.py"),
    ("pallas_kernels/softmax.py", "m = jnp.maximum(sink, FLOOR)", "m = sink",
     "tests/pallas_kernels/test_softmax.py"),
    # --- layers, models, serving
    ("burst_jax/layers/rope.py", "slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)",
     "slow = (np.arange(head_dim // 2) - low) / (high - low)", "tests/layers"),
    ("burst_jax/layers/nnx_layer.py", "jax.random.fold_in(dropout_key, index)",
     "dropout_key", f"{DROPOUT} tests/layers"),
    ("burst_jax/serving/prompts.py", "not 0 <= ids < vocab_size:", "not 0 <= ids <= vocab_size:",
     "tests/serving/test_serving.py"),
    # --- benchmarks and examples
    ("benchmarks/kernels.py", "size * reach - reach * (reach - 1) / 2", "size * reach - reach * (reach + 1) / 2",
     "tests/benchmarks/test_kernels_benchmark.py"),
    ("benchmarks/kernels.py", "2.0 ** (-8 * (heads + 1) / self.heads)", "2.0 ** (-8 * heads / self.heads)",
     "tests/benchmarks/test_kernels_benchmark.py"),
    ("benchmarks/results.py", "key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1]",
     "key=lambda pair: pair[1]", "tests/benchmarks/test_results.py"),
    ("benchmarks/ring.py", "row.memory = gib(gradient)", "row.memory = gib(forward)",
     "tests/benchmarks/test_ring_benchmark.py"),
    ("benchmarks/train.py", "if not abs(row[name] - first[name]) <= share * first[name]",
     "if abs(row[name] - first[name]) > share * first[name]", "tests/benchmarks/test_model_benchmarks.py"),
    ("benchmarks/communication.py", "total += max(0.0, end - max(start, reached))", "total += end - start",
     "tests/benchmarks/test_model_benchmarks.py"),
    ("examples/run_options.py", "multiple = rows * args.accumulate * microbatches",
     "multiple = rows * microbatches", "tests/project/test_examples.py -k invalid"),
    ("examples/perplexity.py", "        counted = end\n", "", "tests/project/test_hf_examples.py -k windows"),
    ("examples/reporting.py", "        if self.requested:\n            raise KeyboardInterrupt\n", "",
     "tests/project/test_examples.py -k signal"),
]  # fmt: skip
