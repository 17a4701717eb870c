"""Faults of burst_jax/attention."""

# ruff: noqa: E501 (code as it is there)

ORDER = "tests/attention/test_order.py"
SEGMENT_IDS = "burst_jax/attention/segment_ids.py"
FUZZ = "tests/attention/test_fuzz.py"
MASKS = "tests/attention/test_masks.py"
ERRORS = "tests/attention/test_errors.py"
FUNCTIONS = "tests/attention/test_functions.py"
PADDING = "tests/attention/test_padding.py"
ONE_DEVICE = "tests/attention/test_one_device.py"
CALL = "burst_jax/attention/call.py"
ARGUMENTS = "burst_jax/attention/arguments.py"
SHARDINGS = "burst_jax/attention/shardings.py"
INPUTS = "burst_jax/attention/inputs.py"
RULES = "burst_jax/attention/validation.py"
CHECKS = "burst_jax/attention/order.py"
ORDER_RULES = "burst_jax/attention/order_rules.py"

MUTANTS = [
    (ORDER_RULES, "& (segments[:, 1:] != 0)", "", ORDER),
    (ORDER_RULES, "same = (segment == segments[:, samples.before_in_text]) & (segment != 0)",
     "same = segment == segments[:, samples.before_in_text]", ORDER),
    (ORDER_RULES, "& (segment[1:, 0] != 0)", "", ORDER),
    (ORDER_RULES, "== positions[:, samples.before_in_array] + 1", "> positions[:, samples.before_in_array]",
     ORDER),
    (CHECKS, "falls[length // shards - 1 :: length // shards]", "falls[length // shards :: length // shards]",
     ORDER),
    (CHECKS, "jnp.where(wrong, jnp.asarray(jnp.nan, x.dtype), x)", "x", f"{ORDER} -k plain"),
    (CHECKS, "        wrong &= ascends.all(1)\n", "", f"{ORDER} -k go_back"),
    (CHECKS, "reject_other_layout(positions, options, segment_ids)", "reject_other_layout(positions, options)",
     f"{ORDER} -k split_documents"),
    (ORDER_RULES, "& (self.end[:, None] > self.start)", "& (self.end[:, None] < self.start)",
     f"{ORDER} -k layouts_order"),
    (ORDER_RULES, "    is_range &= 3 * squares == of_range * (2 * count - 1)\n", "", f"{ORDER} -k go_back"),
    (ORDER_RULES, " | ((steps_text == count - 1) & elsewhere)", "", f"{ORDER} -k another_layout"),
    (ORDER_RULES, "is_range & wrong &", "wrong &", f"{ORDER} -k go_back"),
    (ORDER_RULES, "permuted & inside if of_whole else permuted", "permuted", f"{ORDER} -k go_back"),
    (ORDER_RULES, "(np.diff(x) < 0).any() and", "", f"{ORDER} -k layouts_order"),
    (ORDER_RULES, "and (np.diff(np.sort(x)) == 1).all()", "", f"{ORDER} -k restarts"),
    (CHECKS, "ids = getattr(arguments, name)\n", "ids = None\n", f"{ORDER} -k plain"),
    (SEGMENT_IDS, "ids + xp.where(is_padding, 0, 1)", "ids", "tests/attention/test_segment_ids.py"),
    (SEGMENT_IDS, "value < 0 and value != padding_id", "value < 0", "tests/attention/test_segment_ids.py"),
    ("burst_jax/attention/validation.py", "x, sizes, padding) for name", "x, sizes) for name", FUZZ),
    ("burst_jax/attention/api.py", "if not mesh.explicit_axes or mesh.manual_axes:", "if True:",
     f"{ONE_DEVICE} -k explicit"),
    (SHARDINGS, "split = axes_size(sharding.mesh, *getattr(sharding, \"spec\", ())) > 1",
     "split = bool(flat_names(*getattr(sharding, \"spec\", ())))", f"{ONE_DEVICE} -k mesh_of_one"),
    (ARGUMENTS, "*MASK_ARRAYS, \"alibi_slopes\",", "*MASK_ARRAYS,", f"{ORDER} -k reads"),
    (CALL, "right = None if arguments.prefix_lengths is not None else 0", "right = 0", PADDING),
    (CALL, "right = 0 if per_sequence and arguments.prefix_lengths is None else None",
     "right = None", f"{MASKS} -k sharded"),
    (CALL, "devices = request.token_devices if local else 1", "devices = 1", f"{MASKS} -k sharded"),
    (CALL, "(query.shape[0], query.shape[2]), jnp.uint32", "(1, query.shape[2]), jnp.uint32",
     f"{FUNCTIONS} -k global"),
    (CALL, "None if own_positions else check", "check", f"{MASKS} -k sharded"),
    (CALL, "min(check_integer(\"attention_chunk_size\", chunk_size, 1), 2**30)",
     "check_integer(\"attention_chunk_size\", chunk_size, 1)", f"{MASKS} -k int32"),
    (INPUTS, "jnp.where(positions() < lengths[:, None], ids, 0)",
     "jnp.where(positions() <= lengths[:, None], ids, 0)", f"{MASKS} -k sharded"),
    (INPUTS, "functools.reduce(jnp.minimum, ends)", "functools.reduce(jnp.maximum, ends)", PADDING),
    (INPUTS, "jnp.maximum(positions() + 1, arrays", "jnp.maximum(positions(), arrays", PADDING),
    (INPUTS, "not offset.ndim else offset[:, None]", "not offset.ndim else offset[:1, None]", PADDING),
    (INPUTS, "KVSide(key, arrays[\"value\"], arrays.get(\"key_value_positions\"), kv_ids)",
     "KVSide(key, arrays[\"value\"], None, kv_ids)", f"{MASKS} -k sharded"),
    (INPUTS, "first_key_in_window(positions(), arrays", "first_key_in_window(positions() + 1, arrays",
     f"{MASKS} -k windows"),
    (INPUTS, "jnp.floor_divide(positions(), size) * size", "lax.div(positions(), size) * size",
     f"{MASKS} -k chunks"),
    (INPUTS, "request.spec.mask.right != 0:", "request.spec.mask.right is None:", f"{MASKS} -k chunks"),
    (RULES, "_MAX_POSITION = 2**30", "_MAX_POSITION = 2**31", ERRORS),
    (RULES, "xp.minimum(x, xp.asarray(_INT32.max, x.dtype))", "x", f"{MASKS} -k int32"),
    (RULES, "if tuple(x.shape) not in shapes.values():", "if x.ndim not in map(len, shapes.values()):",
     ERRORS),
    (RULES, "if not typed or key.ndim:", "if not typed:", ERRORS),
    (RULES, "0 <= int(side) < 2**31", "0 <= int(side) <= 2**31", ERRORS),
    (SHARDINGS, "                used[axis] = name\n", "", ERRORS),
    (SHARDINGS, "\"dropout_seeds\": \"B N\"", "\"dropout_seeds\": \"B\"", f"{FUNCTIONS} -k global"),
    ("burst_jax/attention/block_mask.py", "*shape[-2:]).any(0)", "*shape[-2:]).all(0)",
     f"{MASKS} -k sends"),
    ("burst_jax/attention/block_mask.py", "block_kv).any((0, 2))", "block_kv).all((0, 2))",
     f"{FUNCTIONS} -k block_mask"),
    ("burst_jax/attention/score_mod.py", "count = 5 if name == \"score_mod\" else 4", "count = 5", ERRORS),
    ("burst_jax/attention/score_mod.py", "traced.reads(first) or traced.reads(first + 1)",
     "traced.reads(first + 1)", f"{FUNCTIONS} -k layers"),
    ("burst_jax/attention/api.py", "(\"out\", \"lse\") if return_residual else (\"out\",)",
     "(\"out\", \"lse\")", "tests/attention/test_transforms.py -k debug_infs"),
    ("burst_jax/attention/api.py", "    check_one_device(call.arrays)\n", "", f"{ONE_DEVICE} -k several"),
    ("burst_jax/attention/padding.py", "jnp.ones(arrays[side].shape[:2], jnp.int32)",
     "jnp.ones(arrays[\"query\"].shape[:2], jnp.int32)", PADDING),
    ("burst_jax/attention/padding.py", "else result[:, : query.shape[1]]", "else result", PADDING),
    ("burst_jax/attention/padding.py", "= 0, -x.shape[axis] % multiple", "= -x.shape[axis] % multiple, 0",
     PADDING),
    ("burst_jax/attention/merging.py", "more.astype(jnp.float32), more_lse)", "more, more_lse)",
     ONE_DEVICE),
    ("burst_jax/attention/merging.py", "return merged[0].astype(out.dtype), merged[1]",
     "return merged[0], merged[1]", ONE_DEVICE),
    ("burst_jax/attention/merging.py", "in parts[1:]:", "in parts[1:2]:", ONE_DEVICE),
]  # fmt: skip
