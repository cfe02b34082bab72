"""Who runs in a step, with how many tokens, which pictures are encoded, and who is preempted.

First come, first served: sequences are admitted in order of arrival, but for those whose beginning another one is
computing, which others pass. Decodes go first, prompts fill what is left of the token budget in order of admission, and
who was admitted last gives up its blocks when blocks run out. What of them is still in memory when it runs again is not
computed again, and the outcome is the same either way.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.encoder import EncoderCache
from vlmserve.cache.prefix import Hit, PrefixCache, Transfer
from vlmserve.scheduler.sequence import Sequence
from vlmserve.types import CrossInput, EngineOutput, FinishReason, ImageInput


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence. `samples`: they reach its end, so a token follows."""

    sequence: Sequence
    num_tokens: int
    samples: bool


class Look(NamedTuple):
    """What sequences look at by cross attention is to be made of a picture, whose features are there, and a text."""

    key: bytes
    cross: CrossInput


@dataclass(slots=True)
class Step:
    """One batch. Chunks of one token come first.

    Before it runs: `clear` are blocks to zero, `transfers` blocks to copy, `evict` pictures whose embeddings are
    dropped and what is no longer looked at, `encode` pictures to encode, `look` what is to be looked at, in this order.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    clear: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    encode: list[ImageInput] = field(default_factory=list)
    look: list[Look] = field(default_factory=list)
    evict: list[bytes] = field(default_factory=list)


class Scheduler:
    """Owns the sequences, their blocks and their pictures' places in the encoder cache."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        encoder_cache: EncoderCache,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_encoded_images: int,
        image_token_bytes: int,
        prefix_caching: bool,
        window: int | None = None,
        state_bytes: int = 0,
    ) -> None:
        """image_token_bytes: of an embedding. window: how many positions a token sees at most, itself included, in
        every layer; None: all. state_bytes: of a state that sequences look at by cross attention."""
        self.cache = cache
        self.pool: BlockPool = cache.pool
        self.encoder_cache = encoder_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_cached_tokens = 0
        self.encoder_queries = 0
        self.encoder_hits = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_encoded_images = max_encoded_images
        self._image_token_bytes = image_token_bytes
        self._prefix_caching = prefix_caching
        self._window = window
        self._state_bytes = state_bytes
        # Who is computing the block with a key: whoever needs it too had better wait for it.
        self._computing: dict[bytes, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}
        self._spoiled: list[int] = []

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt fits into the pool."""
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget sequences and free what they hold; unknown ids are ignored."""
        for request_id in request_ids:
            sequence = self._by_id.get(request_id)
            if sequence is not None:
                self._remove(sequence)

    def schedule(self) -> Step:
        """Plan the next step and take the blocks that it writes to."""
        step = Step()
        budget = self._schedule_running(step)
        while not step.chunks and len(self.running) > 1:
            # Each lacks what another holds, blocks or room for a picture.
            self._preempt(self.running.pop())
            budget = self._schedule_running(step)
        self._schedule_newcomers(step, budget)
        step.transfers, self.cache.transfers = self.cache.transfers, []
        step.clear, self._spoiled = self._spoiled, []
        step.chunks.sort(key=lambda chunk: chunk.num_tokens != 1)
        return step

    def update(self, step: Step, sampled: list[int | None]) -> list[EngineOutput]:
        """Enter a finished step's tokens, one for each chunk that samples, in order; None is a failed one.

        Sequences that end free all they hold. Returns one output for each sampled token.
        """
        outputs = []
        tokens = iter(sampled)
        for chunk in step.chunks:
            sequence = chunk.sequence
            before, after = sequence.num_computed, sequence.num_computed + chunk.num_tokens
            for span in sequence.spans_between(before, after):
                if span.end <= after:
                    self._unpin(sequence, span.image.key, after)
            if sequence.cross is not None:
                # What it looks at was made of the picture, which nobody needs any more.
                self.encoder_cache.unpin(sequence.cross.image.key, sequence.request_id)
            self._register(sequence, after)
            sequence.num_computed = after
            if before < sequence.num_prompt_tokens <= after:
                self._register_tail(sequence, sequence.num_prompt_tokens - 1)
            self._trim(sequence)
            if chunk.samples:
                output = self._append(sequence, next(tokens))
                if output.finish_reason is not None:
                    self._remove(sequence)
                elif sequence.is_long and len(sequence.token_ids) - 1 == sequence.max_short_len:
                    self._start_over(sequence)
                outputs.append(output)
        return outputs

    def _schedule_running(self, step: Step) -> int:
        """Chunks for the running sequences; returns the budget that is left."""
        budget = self._schedule_decodes(step, self._max_num_batched_tokens)
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and budget > 0:
                budget -= self._schedule_chunk(step, sequence, self._take_blocks(sequence, budget))
        return budget

    def _schedule_decodes(self, step: Step, budget: int) -> int:
        """Chunks of one token for all that need just one; returns the budget that is left.

        `running` is in order of admission, so the sequences preempted here are never ones that are in the step already.
        """
        for sequence in [sequence for sequence in self.running if sequence.num_uncomputed == 1]:
            if budget == 0:
                break
            if sequence.num_computed == len(sequence.block_table) * self._block_size:
                while self.pool.num_free == 0 and sequence.block_table:
                    self._preempt(self.running.pop())
                if not sequence.block_table:
                    break  # preempted, and so are all that were admitted later
                sequence.block_table.extend(self.pool.allocate(1))
            budget -= self._schedule_chunk(step, sequence, 1)
        return budget

    def _schedule_newcomers(self, step: Step, budget: int) -> None:
        """Admit waiting sequences in their order while there is room and budget."""
        deferred: list[Sequence] = []
        while budget > 0 and self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting.popleft()
            keys = self._shareable_keys(sequence)
            hit = self._find(sequence, keys)
            if self._is_being_computed(sequence, keys, hit):
                deferred.append(sequence)
                continue
            if not self._admit(sequence, keys, hit):
                self.waiting.appendleft(sequence)
                break
            budget -= self._schedule_chunk(step, sequence, budget)
        self.waiting.extendleft(reversed(deferred))

    def _shareable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of a waiting sequence's full blocks that others may have: at least one token is left, for its logits."""
        if not self._prefix_caching or sequence.prompt_logprobs is not None:
            return []
        return sequence.keys_of_full_blocks((len(sequence.token_ids) - 1) // self._block_size, self._block_size)

    def _find(self, sequence: Sequence, keys: list[bytes]) -> Hit:
        """What is in memory of a waiting sequence with these shareable keys."""
        if not self._prefix_caching or sequence.prompt_logprobs is not None:
            return Hit()
        tail_key = sequence.tail_key(len(sequence.token_ids) - 1, self._block_size)
        return self.cache.find(keys, tail_key, self._first_needed)

    def _first_needed(self, num_blocks: int) -> int:
        """The first block that tokens behind that many blocks see."""
        if self._window is None:
            return 0
        return max(0, num_blocks * self._block_size - self._window + 1) // self._block_size

    def _is_being_computed(self, sequence: Sequence, keys: list[bytes], hit: Hit) -> bool:
        """Whether running sequences compute at least half of what a sequence lacks, which makes it worth a wait."""
        end = hit.end
        while end < len(keys) and keys[end] in self._computing:
            end += 1
        missing = len(sequence.token_ids) - hit.end * self._block_size
        return end > hit.end and 2 * (end - hit.end) * self._block_size >= missing

    def _admit(self, sequence: Sequence, keys: list[bytes], hit: Hit) -> bool:
        """Move a sequence to the running ones, with blocks for all tokens that it needs at a time, if there are enough.

        With a window, these are a window and a chunk; the rest follow as those behind the window become free.
        """
        reach = len(sequence.token_ids)
        if self._window is not None:
            reach = min(reach, hit.end * self._block_size + self._window + self._max_num_batched_tokens)
        missing = -(-reach // self._block_size) - hit.end
        # A free block for each running sequence, or the newcomer would soon be preempted.
        room = self.pool.num_free - missing - len(self.running)
        if hit.tail is not None and self.cache.num_taken(hit) > room:
            hit = hit._replace(tail=None)
        if self.cache.num_taken(hit) > room:
            return False
        sequence.first_block = hit.first
        sequence.block_table.extend([0] * hit.first)
        sequence.block_table.extend(self.cache.take(hit, keys, missing))
        sequence.num_computed = hit.end * self._block_size
        if hit.tail is not None:
            sequence.num_computed = len(sequence.token_ids) - 1
        for key in keys[hit.end :]:
            self._computing.setdefault(key, sequence)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.prefix_queried_tokens += sequence.num_prompt_tokens
            self.prefix_cached_tokens += sequence.num_cached
        self.running.append(sequence)
        return True

    def _register(self, sequence: Sequence, num_computed: int) -> None:
        """Make the blocks findable that become full when `num_computed` tokens are computed."""
        before, after = sequence.num_computed // self._block_size, num_computed // self._block_size
        if after > before and self._prefix_caching:
            keys = sequence.keys_of_full_blocks(after, self._block_size)
            for index in range(before, after):
                self.pool.register(sequence.block_table[index], keys[index])
                self._computing.pop(keys[index], None)

    def _register_tail(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the block findable that begins with the last of the first `num_tokens` tokens, all computed."""
        key = sequence.tail_key(num_tokens, self._block_size) if self._prefix_caching else None
        if key is not None:
            self.pool.register(sequence.block_table[num_tokens // self._block_size], key)

    def _take_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Take the blocks that the next tokens of a sequence lack, as far as there are any.

        Returns how many of the next `num_tokens` tokens have blocks then.
        """
        reach = min(sequence.num_computed + num_tokens, len(sequence.token_ids))
        missing = -(-reach // self._block_size) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(min(missing, self.pool.num_free)))
        return min(num_tokens, len(sequence.block_table) * self._block_size - sequence.num_computed)

    def _trim(self, sequence: Sequence) -> None:
        """Let go of blocks that no later token sees."""
        if self._window is None:
            return
        needed = max(0, sequence.num_computed - self._window + 1) // self._block_size
        if needed > sequence.first_block:
            self.pool.release(sequence.block_table[sequence.first_block : needed])
            sequence.first_block = needed

    def _schedule_chunk(self, step: Step, sequence: Sequence, budget: int) -> int:
        """A chunk of at most `budget` tokens, cut before the first picture that cannot be encoded in this step.

        Tokens that see each other are never cut apart: where not all of them fit it is cut before them, and if it
        begins with them it goes over the budget, which may be less than they are. It may begin among them: what others
        have computed of them has seen all of them. Returns its number of tokens, which may be 0.
        """
        if budget <= 0:
            return 0
        if sequence.cross is not None and not self._secure_look(step, sequence, sequence.cross):
            return 0
        start = sequence.num_computed
        end = start + min(sequence.num_uncomputed, budget)
        if (whole := sequence.whole_range_at(end)) is not None:
            end = whole[0] if whole[0] > start else whole[1]
        for span in sequence.spans_between(start, end):
            if not self._secure(step, sequence, span.image):
                whole = sequence.whole_range_at(span.start)
                end = max(start, span.start if whole is None else whole[0])
                break
        if end > start:
            step.chunks.append(ScheduledChunk(sequence, end - start, end == len(sequence.token_ids)))
        return end - start

    def _secure(self, step: Step, sequence: Sequence, image: ImageInput) -> bool:
        """Pin a picture's embeddings for a sequence, planning their encoding if they are missing."""
        if image.key not in self.encoder_cache:
            if len(step.encode) >= self._max_encoded_images:
                return False
            size = image.num_embeddings * self._image_token_bytes
            evicted = self.encoder_cache.make_room(size)
            if evicted is None:
                return False
            self.encoder_cache.add(image.key, size)
            step.evict.extend(evicted)
            step.encode.append(image)
            sequence.num_encoded += 1
            self.encoder_queries += self.encoder_cache.pin(image.key, sequence.request_id)
        elif self.encoder_cache.pin(image.key, sequence.request_id):
            self.encoder_queries += 1
            self.encoder_hits += 1
        return True

    def _secure_look(self, step: Step, sequence: Sequence, cross: CrossInput) -> bool:
        """Pin what a sequence looks at for as long as it runs, planning its making if it is missing.

        The picture's features are pinned for this step, in which they are needed only if it is.
        """
        key, image, owner = sequence.cross_key, cross.image, sequence.request_id
        assert key is not None
        if key in self.encoder_cache:
            if self.encoder_cache.pin(key, owner):
                self.encoder_queries += 1
                self.encoder_hits += 1
            return True
        sizes = {key: cross.num_states * self._state_bytes}
        known = image.key in self.encoder_cache
        if known:
            self.encoder_cache.pin(image.key, owner)
        else:
            sizes[image.key] = image.num_embeddings * self._image_token_bytes
        full = not known and len(step.encode) >= self._max_encoded_images
        evicted = None if full else self.encoder_cache.make_room(sum(sizes.values()))
        if evicted is None:
            self.encoder_cache.unpin(image.key, owner)
            return False
        for new, size in sizes.items():
            self.encoder_cache.add(new, size)
            self.encoder_cache.pin(new, owner)
        step.evict.extend(evicted)
        step.look.append(Look(key, cross))
        if not known:
            step.encode.append(image)
            sequence.num_encoded += 1
        self.encoder_queries += 1
        self.encoder_hits += known
        return True

    def _append(self, sequence: Sequence, token: int | None) -> EngineOutput:
        new: list[int] = []
        reason: FinishReason | None = None
        end, error, error_param = None, None, None
        matcher = sequence.matcher
        if token is None and matcher is not None and (matcher.finished or matcher.error):
            reason = "stop" if matcher.finished else "error"
            error = matcher.error and f"the grammar cannot be followed any further: {matcher.error}"
            error_param = None if sequence.params.grammar is None else sequence.params.grammar.source
        elif token is None:
            self._spoil(sequence)
            reason, error = "error", "the model's output is not a number; try another dtype (--dtype float32)"
        elif token in sequence.end_token_ids:
            reason, end = "stop", token
        else:
            sequence.append(token)
            new = [token]
            reason = "length" if len(sequence.token_ids) >= sequence.max_len else None
            if matcher is not None:
                matcher.advance(token)
                if matcher.cut and matcher.complete:
                    reason = "length"
                elif matcher.finished:
                    reason = "stop"
        return EngineOutput(
            sequence.request_id,
            new,
            reason,
            end,
            error,
            sequence.num_cached or 0,
            sequence.num_encoded,
            error_param=error_param if error else None,
        )

    def _spoil(self, sequence: Sequence) -> None:
        """Keep a failed sequence's keys and values, which may be NaN, from whoever gets its blocks next.

        A block is read as a whole, and what is masked still spoils a sum if it is NaN.
        """
        for block in sequence.block_table[sequence.first_block :]:
            self.pool.forget(block)
            if self.pool.ref_count(block) == 1:
                self._spoiled.append(block)

    def _unpin(self, sequence: Sequence, key: bytes, num_computed: int) -> None:
        """Unpin a picture unless that many tokens end in the middle of it.

        Where it comes again later it may have been evicted by then: held on to, it could keep out the picture between.
        """
        if not any(s.image.key == key and s.start < num_computed < s.end for s in sequence.image_spans):
            self.encoder_cache.unpin(key, sequence.request_id)

    def _release(self, sequence: Sequence) -> None:
        # The deepest block first: it is of no use without those before it, so it is to be evicted before them.
        self.pool.release(reversed(sequence.block_table[sequence.first_block :]))
        sequence.block_table = array("i")
        sequence.first_block = 0
        for key in sequence.block_keys:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        for span in sequence.image_spans:
            self.encoder_cache.unpin(span.image.key, sequence.request_id)
        if sequence.cross is not None and sequence.cross_key is not None:
            for key in (sequence.cross_key, sequence.cross.image.key):
                self.encoder_cache.unpin(key, sequence.request_id)

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.num_uncomputed == 1:
            self._register_tail(sequence, sequence.num_computed)
        self._release(sequence)
        sequence.num_computed = 0
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        """Compute a sequence again from its first token on, which is long now."""
        self._release(sequence)
        sequence.num_computed = 0
        sequence.start_over()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._release(sequence)
        del self._by_id[sequence.request_id]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
