"""PagedKVCache against a dictionary of tensors: whatever is appended, forked, cropped or freed, a sequence reads its own."""

import copy
import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import attend as oracle_attend
from torch.utils._python_dispatch import TorchDispatchMode

from nibblekv import AttentionOptions, KVCacheLayout, dequantize, quantize
from nibblekv.cache import RAW_MARGIN, CacheFullError, PagedKVCache, raw_row_count

POISON = 0xFF
HEADS = 2
FORMATS = ("int8_per_token_head", "fp8_per_token_head")  # no rotation: what is read back is exact, row by row


def layouts(block_size=16):
    first = KVCacheLayout.create(FORMATS[0], num_kv_heads=HEADS, head_size=32, block_size=block_size)
    second = KVCacheLayout.create(FORMATS[1], num_kv_heads=1, head_size=40, head_size_v=64, block_size=block_size)
    return [first, second]


def make(num_blocks=None, block_size=16):
    return PagedKVCache(layouts(block_size), num_blocks=num_blocks, backend="reference")


def rows(layout, count, generator):
    key = torch.randn(count, layout.num_kv_heads, layout.head_size, generator=generator)
    value = torch.randn(count, layout.num_kv_heads, layout.head_size_v, generator=generator)
    return key, value


def stored(x, layout, role):
    return dequantize(*quantize(x, layout.k_format, role=role), layout.k_format)


def random_tokens(cache, count, generator):
    pairs = [rows(layout, count, generator) for layout in cache.layouts]
    return [key for key, _ in pairs], [value for _, value in pairs]


class PagedKVCacheMachine(RuleBasedStateMachine):
    """Random appends, forks, crops and frees on a small pool, mirrored in `self.model`: id -> one (key, value) per layer."""

    num_blocks = 14

    @initialize(seed=st.integers(0, 2**31))
    def start(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = make(self.num_blocks)
        self.model = {}
        for seq_id in self.cache.add_sequences(2):
            self.model[seq_id] = [rows(layout, 0, self.generator) for layout in self.cache.layouts]

    def pick(self, data, max_size=4):
        ids = sorted(self.model)
        return data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=max_size, unique=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append(self, data):
        ids = self.pick(data)
        counts = [data.draw(st.sampled_from((0, 1, 1, 3, 15, 16, 17, 40))) for _ in ids]
        keys, values = random_tokens(self.cache, sum(counts), self.generator)
        before = self.snapshot()
        try:
            step = self.cache.append(ids, keys, values, counts)
        except CacheFullError:
            assert self.num_blocks is not None
            assert self.snapshot() == before
            return
        assert step.seq_lens.tolist() == [self.cache.length(i) for i in ids]
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            layout = self.cache.layouts[layer]
            parts = zip(
                ids, *(stored(x, layout, role).split(counts) for role, x in (("key", key), ("value", value))), strict=True
            )
            for seq_id, new_key, new_value in parts:
                old_key, old_value = self.model[seq_id][layer]
                self.model[seq_id][layer] = torch.cat((old_key, new_key)), torch.cat((old_value, new_value))

    @precondition(lambda self: self.model and len(self.model) < 8)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data, count):
        parents = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=count, max_size=count))
        for parent, child in zip(parents, self.cache.fork(parents), strict=True):
            self.model[child] = list(self.model[parent])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def crop(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, self.cache.length(seq_id)))
        self.cache.crop(seq_id, length)
        self.model[seq_id] = [(key[:length], value[:length]) for key, value in self.model[seq_id]]

    @rule(data=st.data())
    def free_and_add(self, data):
        if self.model:
            ids = self.pick(data, 2)
            self.cache.free(ids)
            for seq_id in ids:
                del self.model[seq_id]
        if len(self.model) < 4:
            (seq_id,) = self.cache.add_sequences()
            assert seq_id not in self.model
            self.model[seq_id] = [rows(layout, 0, self.generator) for layout in self.cache.layouts]

    def snapshot(self):
        owners = {seq_id: self.cache.blocks(seq_id) for seq_id in self.cache.seq_ids}
        return owners, [self.cache.length(seq_id) for seq_id in owners], self.cache.num_free_blocks

    @invariant()
    def pages_have_the_right_owners(self):
        owned = [block for seq_id in self.cache.seq_ids for block in self.cache.blocks(seq_id)]
        assert self.cache.num_free_blocks == self.cache.num_blocks - len(set(owned))
        assert tuple(sorted(self.model)) == tuple(sorted(self.cache.seq_ids))

    @invariant()
    def sequences_read_their_own_tokens(self):
        owned = {block for seq_id in self.cache.seq_ids for block in self.cache.blocks(seq_id)}
        free = [block for block in range(self.cache.num_blocks) if block not in owned]
        for kv_cache in self.cache.kv_caches:
            kv_cache[free] = POISON
        for seq_id, layers in self.model.items():
            for layer, expected in enumerate(layers):
                for got, want in zip(self.cache.gather(seq_id, layer), expected, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=0)


class GrowingCacheMachine(PagedKVCacheMachine):
    num_blocks = None


TestFixedPool = PagedKVCacheMachine.TestCase
TestGrowingPool = GrowingCacheMachine.TestCase
TestFixedPool.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestGrowingPool.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_full_cache_changes_nothing_and_goes_on(generator):
    """A batch that does not fit is refused whole: the sequence that would have fitted keeps its length and its bytes."""
    cache = make(num_blocks=3)
    small, large = cache.add_sequences(2)
    cache.append([small, large], *random_tokens(cache, 10, generator), [5, 5])
    before = [kv_cache.clone() for kv_cache in cache.kv_caches]
    with pytest.raises(CacheFullError, match=r"expected 2 free pages of 16 tokens, got 1 of 3; free or crop"):
        cache.append([small, large], *random_tokens(cache, 31, generator), [1, 30])
    assert (cache.length(small), cache.length(large), cache.num_free_blocks) == (5, 5, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.kv_caches, strict=True))
    cache.append([small], *random_tokens(cache, 1, generator))
    cache.free([large])
    cache.append([small], *random_tokens(cache, 42, generator), 42)
    assert cache.length(small) == 48


def test_bad_rows_leave_the_sequences_as_they_were(generator):
    cache = make(num_blocks=4)
    ids = cache.add_sequences(2)
    keys, values = random_tokens(cache, 6, generator)
    with pytest.raises(ValueError, match="value: expected shape"):
        cache.append(ids, keys, [values[0], values[1][:, :, :40]], 3)
    assert [cache.length(i) for i in ids] == [0, 0]
    assert cache.num_free_blocks == 4
    with pytest.raises(ValueError, match="key: expected one tensor per layer, 2, got 1"):
        cache.append(ids, keys[0], values, 3)


def test_fork_copies_only_the_unfull_page(generator):
    """Beams share full pages; of the owners of a page that is written to, all but the last get their own copy."""
    cache = make()
    (parent,) = cache.add_sequences()
    cache.append([parent], *random_tokens(cache, 20, generator), 20)
    children = cache.fork([parent, parent])
    assert cache.num_blocks - cache.num_free_blocks == 2
    family = [parent, *children]
    cache.append(family, *random_tokens(cache, 3, generator))
    pages = [cache.blocks(i) for i in family]
    assert len({p[0] for p in pages}) == 1
    assert len({p[1] for p in pages}) == 3
    assert cache.num_blocks - cache.num_free_blocks == 4
    before = cache.gather(parent)[0]
    cache.append(children, *random_tokens(cache, 2, generator))
    torch.testing.assert_close(cache.gather(parent)[0], before, rtol=0, atol=0)


def test_growth_keeps_every_byte_and_wastes_little(generator):
    cache = make()
    (seq_id,) = cache.add_sequences()
    cache.append([seq_id], *random_tokens(cache, 1000, generator), 1000)
    before = cache.gather(seq_id, 1)
    used = cache.num_blocks
    cache.append([seq_id], *random_tokens(cache, 1991, generator), 1991)
    for _ in range(10):
        cache.append([seq_id], *random_tokens(cache, 1, generator))
    for got, want in zip(cache.gather(seq_id, 1), before, strict=True):
        torch.testing.assert_close(got[:1000], want, rtol=0, atol=0)
    assert used < -(-3001 // 16) <= cache.num_blocks <= -(-3001 // 16) * 65 // 64
    assert cache.nbytes == sum(kv_cache.numel() for kv_cache in cache.kv_caches)


def test_attend_reads_the_sequences_of_the_step(generator):
    """Rows of the block table that are not neighbours, in another order than they were made, next to poisoned pages."""
    cache = make(num_blocks=12)
    ids = cache.add_sequences(4)
    cache.append(ids, *random_tokens(cache, 4 * 21, generator), 21)
    cache.free([ids[1]])
    for kv_cache in cache.kv_caches:
        owned = [block for i in cache.seq_ids for block in cache.blocks(i)]
        kv_cache[[block for block in range(12) if block not in owned]] = POISON
    chosen = [ids[3], ids[0]]
    step = cache.append(chosen, *random_tokens(cache, 3, generator), [2, 1])
    query = torch.randn(3, 4, 32, generator=generator)
    out = cache.attend(step, query, 0, softmax_scale=0.5)
    for first, last, seq_id in ((0, 2, chosen[0]), (2, 3, chosen[1])):
        key, value = (x.repeat_interleave(2, 1).transpose(0, 1) for x in cache.gather(seq_id))
        visible = torch.ones(last - first, key.shape[1], dtype=torch.bool).tril(key.shape[1] - (last - first))
        want = torch.nn.functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1), key, value, attn_mask=visible, scale=0.5
        )
        torch.testing.assert_close(out[first:last], want.transpose(0, 1), rtol=1e-5, atol=1e-5)
    again = cache.attend(cache.view(chosen, [2, 1]), query, 0, softmax_scale=0.5)
    torch.testing.assert_close(again, out, rtol=0, atol=0)


def test_raw_keys_of_the_step_replace_their_stored_form(generator):
    cache = make()
    (seq_id,) = cache.add_sequences()
    keys, values = random_tokens(cache, 5, generator)
    step = cache.append([seq_id], keys, values, 5)
    query = torch.randn(5, HEADS, 32, generator=generator)
    out = cache.attend(step, query, 0, key=keys[0], value=values[0], softmax_scale=1.0)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, keys[0], values[0])), is_causal=True, scale=1.0
    ).transpose(0, 1)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_a_layer_added_later_starts_as_zeros_and_wipes_nothing(generator):
    """No first-touch writes: a new layer on a pool in use must not change the others."""
    cache = PagedKVCache(layouts()[0], backend="reference")
    (seq_id,) = cache.add_sequences()
    cache.append([seq_id], *rows(cache.layouts[0], 7, generator), 7)
    before = cache.gather(seq_id)
    layer = cache.add_layer(layouts()[1])
    torch.testing.assert_close(cache.gather(seq_id), before, rtol=0, atol=0)
    assert not cache.gather(seq_id, layer)[0].any()


def test_a_deep_copy_is_independent(generator):
    """A prompt's cache is copied and continued: the original keeps its tokens."""
    cache = make()
    (seq_id,) = cache.add_sequences()
    cache.append([seq_id], *random_tokens(cache, 7, generator), 7)
    before = cache.gather(seq_id)
    other = copy.deepcopy(cache)
    other.append([seq_id], *random_tokens(other, 30, generator), 30)
    assert (cache.length(seq_id), other.length(seq_id)) == (7, 37)
    torch.testing.assert_close(cache.gather(seq_id), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, i: PagedKVCache([]), "layouts: expected at least one"),
        (lambda c, i: PagedKVCache(layouts(), num_blocks=0), "num_blocks: expected at least 1 or None, got 0"),
        (lambda c, i: PagedKVCache(layouts(), num_blocks=2**28), "num_blocks: expected at most 134217727"),
        (lambda c, i: c.add_layer(layouts(32)[0]), "layout: expected block_size 16, got 32"),
        (lambda c, i: c.add_sequences(0), "count: expected at least 1, got 0"),
        (lambda c, i: c.extend([i, i]), "seq_ids: expected each sequence once"),
        (lambda c, i: c.extend([i], [1, 2]), "num_tokens: expected 1 counts"),
        (lambda c, i: c.extend([i], -1), "num_tokens: expected 1 counts of 0 or more"),
        (lambda c, i: c.length(i + 1), "seq_ids: expected sequences of this cache, got 1"),
        (lambda c, i: c.crop(i, 4), "length: expected 0 to 3, got 4"),
        (lambda c, i: c.view([i], 4), "num_tokens: expected at most 3 for sequence 0, got 4"),
        (lambda c, i: c.free([i, i]), "seq_ids: expected each sequence once"),
    ],
)
def test_bad_arguments_are_named(call, message, generator):
    cache = make()
    (seq_id,) = cache.add_sequences()
    cache.append([seq_id], *random_tokens(cache, 3, generator), 3)
    with pytest.raises(ValueError, match=message):
        call(cache, seq_id)
    assert cache.length(seq_id) == 3


# --- window and sinks ----------------------------------------------------------------------------------------------------

WINDOW, SINKS = 5, 3


def make_windowed(window=WINDOW, sinks=SINKS, num_blocks=None, backend="reference"):
    return PagedKVCache(
        layouts(), num_blocks=num_blocks, backend=backend, window=window, sinks=sinks, raw_dtype=torch.float32
    )


class Kept:
    """A sequence as it must be read: each layer's rows as they came, and which position each slot of the ring holds."""

    def __init__(self, cache, other=None):
        self.layouts, self.sinks, self.ring = cache.layouts, cache.sinks, cache.window + RAW_MARGIN
        self.rows = list(other.rows) if other else [rows(layout, 0, torch.Generator()) for layout in cache.layouts]
        self.slots = dict(other.slots) if other else {}

    @property
    def length(self):
        return self.rows[0][0].shape[0]

    def append(self, new):
        first = self.length
        self.rows = [join(old, pair) for old, pair in zip(self.rows, new, strict=True)]
        for p in range(max(first, self.sinks), self.length):
            self.slots[(p - self.sinks) % self.ring] = p

    def crop(self, length):
        self.rows = [(key[:length], value[:length]) for key, value in self.rows]

    def packed(self):
        """Return each layer's (key, value) as pages hold them."""
        return [
            tuple(map(stored, pair, (layout, layout), ("key", "value")))
            for pair, layout in zip(self.rows, self.layouts, strict=True)
        ]

    def raw(self):
        """Return each layer's (key, value) as window and sinks give them: stored where the ring has lost a token."""
        places = range(self.length)
        held = [p < self.sinks or self.slots.get((p - self.sinks) % self.ring) == p for p in places]
        held = torch.tensor(held, dtype=torch.bool)[:, None, None]
        pairs = zip(self.rows, self.packed(), strict=True)
        return [tuple(torch.where(held, x, y) for x, y in zip(*pair, strict=True)) for pair in pairs]


def join(first, second):
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))


def assert_reads(cache, step, packed, raw, generator, strict=True, keys=None, values=None):
    """Compare a step's attention in every layer with the oracle's over each sequence's packed and raw (key, value)."""
    starts = [0, *torch.tensor(step.num_tokens).cumsum(0).tolist()]
    for layer, layout in enumerate(cache.layouts):
        query = torch.randn(starts[-1], 2 * layout.num_kv_heads, layout.head_size, generator=generator)
        own = {} if keys is None else {"key": keys[layer], "value": values[layer]}
        out = cache.attend(step, query, layer, strict=strict, **own)
        read = [sequence[layer] for sequence in packed]
        if not strict:  # the step's own tokens
            read = [
                join([x[: len(x) - n] for x in pair], [x[len(x) - n :] for x in sequence[layer]])
                for pair, sequence, n in zip(read, raw, step.num_tokens, strict=True)
            ]
        options = AttentionOptions(layout.head_size**-0.5, raw_window=cache.window, raw_sinks=cache.sinks)
        want, _ = oracle_attend(query, read, starts, options, [sequence[layer] for sequence in raw])
        assert want.abs().max() > 0.05
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5 if cache.backend == "reference" else 1e-3)


class WindowMachine(RuleBasedStateMachine):
    """Random appends of any length, forks, crops and frees; every sequence reads its own window, sinks and pages."""

    @initialize(seed=st.integers(0, 2**31), kept=st.sampled_from(((WINDOW, SINKS), (1, 0), (0, 20), (WINDOW, 20))))
    def start(self, seed, kept):
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = make_windowed(*kept)
        self.model = {i: Kept(self.cache) for i in self.cache.add_sequences(2)}

    def pick(self, data, max_size=3):
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=max_size, unique=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), strict=st.booleans())
    def append(self, data, strict):
        ids = self.pick(data)
        counts = [data.draw(st.sampled_from((0, 1, 1, 3, 7, 33, 34, 50))) for _ in ids]
        keys, values = random_tokens(self.cache, sum(counts), self.generator)
        before = [self.model[i].raw() for i in ids]
        step = self.cache.append(ids, keys, values, counts)
        parts = [list(zip(k.split(counts), v.split(counts), strict=True)) for k, v in zip(keys, values, strict=True)]
        for b, seq_id in enumerate(ids):
            self.model[seq_id].append([pairs[b] for pairs in parts])
        if sum(counts):
            # Earlier tokens as the ring held them before the step, which may have overwritten them; the step's own raw.
            raw = [[join(x, pairs[b]) for x, pairs in zip(old, parts, strict=True)] for b, old in enumerate(before)]
            packed = [self.model[i].packed() for i in ids]
            own = {"keys": keys, "values": values} if max(counts) > 1 else {}
            assert_reads(self.cache, step, packed, raw, self.generator, strict or not own, **own)

    @precondition(lambda self: any(kept.length for kept in self.model.values()))
    @rule(data=st.data())
    def view(self, data):
        ids = [i for i in self.model if self.model[i].length]
        counts = [data.draw(st.integers(1, min(self.model[i].length, RAW_MARGIN + 1))) for i in ids]
        kept = [self.model[i] for i in ids]
        step = self.cache.view(ids, counts)
        assert_reads(self.cache, step, [k.packed() for k in kept], [k.raw() for k in kept], self.generator)

    @precondition(lambda self: self.model and len(self.model) < 6)
    @rule(data=st.data())
    def fork(self, data):
        parents = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=2))
        for parent, child in zip(parents, self.cache.fork(parents), strict=True):
            self.model[child] = Kept(self.cache, self.model[parent])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def crop(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        length = self.cache.length(seq_id)
        length = data.draw(st.integers(0, length) | st.integers(max(length - RAW_MARGIN, 0), length))
        self.cache.crop(seq_id, length)
        self.model[seq_id].crop(length)

    @rule(data=st.data())
    def free_and_add(self, data):
        if self.model:
            for seq_id in self.pick(data, 2):
                self.cache.free([seq_id])
                del self.model[seq_id]
        for seq_id in self.cache.add_sequences(2 if len(self.model) < 3 else 1):
            self.model[seq_id] = Kept(self.cache)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=12, stateful_step_count=10, deadline=None, derandomize=True)


def test_a_crop_of_a_draft_keeps_the_window_whole(generator):
    """Catches a ring without room for drafts: after verifying and dropping RAW_MARGIN tokens, the window is raw."""
    cache = make_windowed(backend="auto")
    ids = cache.add_sequences()
    kept = Kept(cache)
    for count, keep in ((60, 60), (RAW_MARGIN + 1, 61), (20, 62), (1, 63)):
        keys, values = random_tokens(cache, count, generator)
        cache.append(ids, keys, values, count)
        kept.append(list(zip(keys, values, strict=True)))
        cache.crop(ids[0], keep)
        kept.crop(keep)
        whole = [join(kept.packed()[i], kept.rows[i]) for i in range(2)]  # twice the length: packed, then raw
        raw = [tuple(x[len(x) // 2 :] for x in pair) for pair in whole]
        assert_reads(cache, cache.view(ids), [kept.packed()], [raw], generator)


@pytest.mark.parametrize("keep", [52, 37, 9, 3])
@pytest.mark.parametrize("then", ["view", "append"])
def test_a_crop_beyond_the_margin_reads_the_lost_tokens_as_stored(generator, keep, then):
    """Catches rows of tokens that were dropped, read in place of older ones which they have overwritten in the ring."""
    cache = make_windowed()
    (seq_id,) = cache.add_sequences()
    kept = Kept(cache)

    def append(count):
        keys, values = random_tokens(cache, count, generator)
        step = cache.append([seq_id], keys, values, count)
        kept.append(list(zip(keys, values, strict=True)))
        return step

    append(90)
    cache.crop(seq_id, keep)
    kept.crop(keep)
    if then == "view":
        assert_reads(cache, cache.view([seq_id], min(keep, 3)), [kept.packed()], [kept.raw()], generator)
    before = kept.raw()
    step = append(2)
    raw = [join(old, [x[-2:] for x in new]) for old, new in zip(before, kept.rows, strict=True)]
    assert_reads(cache, step, [kept.packed()], [raw], generator)


def test_bytes_of_window_and_sinks_are_counted(generator):
    """A fixed number per sequence and layer, whatever its length; none without."""
    plain, cache = make(8), make_windowed(num_blocks=8)
    ids = cache.add_sequences(3)
    per_token = 4 * (2 * HEADS * 32 + 40 + 64)
    assert cache.nbytes == plain.nbytes + 3 * (SINKS + WINDOW + RAW_MARGIN) * per_token
    cache.append(ids, *random_tokens(cache, 3 * 30, generator), 30)
    assert cache.nbytes == plain.nbytes + 3 * (SINKS + WINDOW + RAW_MARGIN) * per_token
    assert raw_row_count(0, 0) == 0
    assert raw_row_count(0, 7) == 7


def test_long_steps_with_a_window_need_their_own_rows(generator):
    """Catches rows that the step itself overwrote read as older tokens'."""
    cache = make_windowed()
    ids = cache.add_sequences()
    count = RAW_MARGIN + 2
    keys, values = random_tokens(cache, count, generator)
    step = cache.append(ids, keys, values, count)
    query = torch.randn(count, HEADS, 32, generator=generator)
    with pytest.raises(ValueError, match="key: expected the step's own key and value with a window"):
        cache.attend(step, query)
    cache.append(ids, *random_tokens(cache, 1, generator))
    with pytest.raises(ValueError, match="step: expected the step that layer 0 wrote last"):
        cache.attend(cache.view(ids, count), query, key=keys[0], value=values[0])
    with pytest.raises(ValueError, match="window, sinks: expected 0"):
        make_windowed(-1)


def test_window_is_written_where_gradients_are_recorded(generator):
    """Catches a store that becomes part of a graph."""
    cache = make_windowed()
    ids = cache.add_sequences()
    for _ in range(2):
        keys, values = random_tokens(cache, 2, generator)
        step = cache.append(ids, [key.requires_grad_() for key in keys], values, 2)
    out = cache.attend(step, torch.randn(2, 2 * HEADS, 32, generator=generator))
    assert out.isfinite().all()
    assert not out.requires_grad


def test_a_call_of_a_known_kind_is_guarded_as_the_first_one(generator):
    """Catches a second call that skips the checks and reads a query of other strides, under autocast or into a graph."""
    cache = make()
    ids = cache.add_sequences()
    cache.append(ids, *random_tokens(cache, 20, generator), 20)
    step = cache.view(ids, 3)
    query = torch.randn(3, HEADS, 32, generator=generator)
    plain = cache.attend(step, query)
    with pytest.raises(ValueError, match="query: expected a contiguous last dimension"):
        cache.attend(step, query.repeat_interleave(2, -1)[..., ::2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(cache.attend(step, query), plain, rtol=0, atol=0)
    assert not cache.attend(step, query.clone().requires_grad_()).requires_grad
    told = cache.attend(step, query, host_lengths=([0, 3], [20]))
    torch.testing.assert_close(told, plain, rtol=0, atol=0)


def test_memory_that_runs_out_changes_nothing(generator, monkeypatch):
    """Catches sequences, layers and rows of which only a part was made when an allocation failed."""
    cache = make_windowed()
    ids = cache.add_sequences()
    allocate, calls = PagedKVCache._allocate_raw, []

    def fail_second(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("full")
        return allocate(self, *arguments)

    monkeypatch.setattr(PagedKVCache, "_allocate_raw", fail_second)
    with pytest.raises(MemoryError):
        cache.add_sequences(3)
    assert cache.seq_ids == tuple(ids)
    calls[:] = [None]
    with pytest.raises(MemoryError):
        cache.add_layer(layouts()[0])
    assert len(cache.layouts) == len(cache.kv_caches) == 2
    monkeypatch.undo()
    more = ids + cache.add_sequences(3)
    assert len(set(more)) == 4
    keys, values = random_tokens(cache, 8, generator)
    step = cache.append(more, keys, values, 2)
    query = torch.randn(8, HEADS, 32, generator=generator)
    expected = []
    for i in range(4):
        alone = make_windowed()
        one = alone.append(
            alone.add_sequences(), [k[2 * i : 2 * i + 2] for k in keys], [v[2 * i : 2 * i + 2] for v in values], 2
        )
        expected.append(alone.attend(one, query[2 * i : 2 * i + 2]))
    torch.testing.assert_close(cache.attend(step, query), torch.cat(expected), rtol=0, atol=0)


class FullAt(TorchDispatchMode):
    """Runs out of memory at one operation of a device."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise MemoryError(str(func))
        return func(*args, **(kwargs or {}))


def test_memory_that_runs_out_in_any_operation_changes_nothing(generator):
    """Catches a length, a page, a count or a kept row that is as after a step, or a fork, which the caller never got."""
    spoiled, twin = make_windowed(num_blocks=24), make_windowed(num_blocks=24)
    first, second = spoiled.add_sequences(2)
    twin.add_sequences(2)
    tokens = random_tokens(spoiled, 42, generator)
    for cache in (spoiled, twin):
        cache.append([first, second], *tokens, [37, 5])
        cache.crop(first, 35)

    def state():
        return [(i, spoiled.length(i), spoiled.blocks(i)) for i in spoiled.seq_ids], spoiled.num_free_blocks

    def failing_everywhere(call):
        before = state()
        for number in itertools.count():
            try:
                with FullAt(number):
                    result = call(spoiled)
            except MemoryError:
                assert state() == before
                continue
            assert number > 2
            return result

    forks = failing_everywhere(lambda cache: cache.fork([first, first, second, second]))
    assert twin.fork([first, first, second, second]) != []
    ids = [first, *forks]
    # A shared page that is not full, a wider block table, a step that overwrites kept rows, a sequence that gets nothing.
    counts = [RAW_MARGIN + 15, 40, 2, 1, 0]
    step = failing_everywhere(lambda cache: cache.extend(ids, counts))
    other = twin.extend([*twin.seq_ids[:1], *twin.seq_ids[2:]], counts)
    keys, values = random_tokens(spoiled, sum(counts), generator)
    query = torch.randn(sum(counts), HEADS, 32, generator=generator)
    for layer in range(2):
        seen = []
        for cache, its_step in ((spoiled, step), (twin, other)):
            cache.write(its_step, keys[layer], values[layer], layer)
            own = {"key": keys[layer], "value": values[layer], "strict": True}
            q = query if layer == 0 else query[..., :8].repeat(1, 1, 5)
            seen.append(cache.attend(its_step, q, layer, **own))
        assert torch.equal(*seen)
    spoiled.free(spoiled.seq_ids)
    assert spoiled.num_free_blocks == 24
