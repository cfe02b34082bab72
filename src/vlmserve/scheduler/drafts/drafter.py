"""Proposes drafts: known tokens that an answer may repeat."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from vlmserve.cache.keys import answers_key, block_key, touched_images
from vlmserve.scheduler.drafts.corpus import LONGEST_MATCH, SEPARATOR, Answers, Corpus
from vlmserve.scheduler.drafts.costs import MAX_DRAFTS, Account, StepCosts
from vlmserve.scheduler.drafts.layer import Layer, LayerCosts, worth
from vlmserve.scheduler.drafts.reader import NUM_CLASSES, Drafting, Kind, Rate, Reader, Source
from vlmserve.scheduler.request import Request
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput
from vlmserve.tasks import GENERATE

MAX_KEPT_TOKENS = 1 << 18
"""Maximum tokens of earlier answers, about 70 MB."""
_ORDER: tuple[Source, ...] = ("repeat", "grammar", "prediction", "own", "image", "schema", "mtp")
_FORCED: Kind = "grammar", NUM_CLASSES - 1
_MAX_KEPT_OF_KEY = 1 << 13
_MAX_INDEXED = 1 << 14
"""Last tokens of a prompt that are indexed."""
_PREDICTED_MATCH = 6
"""Match length that a prediction starts with, in tokens."""
_MIN_KEPT = 4
"""Minimum tokens of a stored answer."""
_MAX_PROMPT_ROWS = 512
"""Prompt tokens of a step beyond which the cost per row is constant."""
_FIRST_RATES = ((1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (4.0, 1.0), (8.0, 1.0))
"""Assumed right and wrong drafts at start, by match class."""
_FIRST_RATE_OF_MODEL = 2.0, 1.0
"""Assumed right and wrong drafts of the model at start."""
_MAX_PREDICTED = 8
"""Maximum drafts of the model after a step."""
_IN_FLIGHT = 2
"""Tokens of a request in flight when the engine decides whether to wait for them."""
_TRUSTED = 3.0
"""Drafts after which a request's own rate counts as much as the global rate."""


class _Found(NamedTuple):
    """rates: probability that each token is right if all earlier ones are."""

    kind: Kind
    rates: list[float]
    token_ids: list[int]

    @property
    def num_expected(self) -> float:
        """Tokens that are probably right."""
        return math.fsum(accumulate(self.rates, mul))


class Drafter:
    def __init__(
        self,
        costs: StepCosts,
        layer: LayerCosts | None = None,
        max_predicting: int = 256,
    ) -> None:
        """layer: the model's own; None: it has none. max_predicting: requests of a step that may run through it."""
        self.num_drafted = self.num_accepted = 0
        self._layer = None if layer is None else Layer(layer, costs.seconds_without(1, 0, is_ahead=True))
        self._account = Account(costs, self._layer)
        self._max_predicting = max_predicting
        self._forced: Mapping[str, list[int]] = {}
        """Tokens that grammars force after the last step, by request."""
        self._answers = Answers(MAX_KEPT_TOKENS, _MAX_KEPT_OF_KEY)
        self._rates: dict[Kind, Rate] = {
            (source, number): Rate(*(_FIRST_RATE_OF_MODEL if source == "mtp" else _FIRST_RATES[number]), most=128)
            for source in _ORDER
            for number in range(NUM_CLASSES)
        }

    def begin_step(self, running: Sequence[Request], *, is_ahead: bool = False, host: float = 0.0) -> bool:
        """Return whether forced tokens are wanted. Finding them takes time, which only a lone request saves again.

        is_ahead, host: see `Account.begin_step`.
        """
        left = [request.num_uncomputed for request in running]
        num_decodes = left.count(1)
        num_prompt_tokens = min(sum(left) - num_decodes, _MAX_PROMPT_ROWS)
        self._account.begin_step(num_decodes, num_prompt_tokens, is_ahead=is_ahead, host=host)
        return len(running) == 1

    def awaits_tokens(self, running: Sequence[Request], host: float, *, is_counted: bool = False) -> bool:
        """Return whether to plan no step until the steps in flight end, because drafts will probably save time.

        Two steps are in flight, each with a token of every request. Call it while the device computes. is_counted:
        `begin_step` was called for the earlier one.
        """
        self._account.begin_step(len(running), 0, is_ahead=True, host=host, is_counted=is_counted)
        for request in running:
            if not self._account.affords_search:
                return False
            started = time.thread_time()
            awaits = request.task == GENERATE and self._account.pay_wait(self._rates_ahead(request), _IN_FLIGHT)
            self._account.spend(time.thread_time() - started)
            if awaits:
                return True
        return False

    def _rates_ahead(self, request: Request) -> list[float]:
        """Return rates of tokens in flight, and of drafts after them."""
        drafting = request.drafting = request.drafting or self._start(request)
        for reader in drafting.readers:
            reader.read(request.token_ids)
        most = min(_IN_FLIGHT + MAX_DRAFTS, request.max_len - len(request.token_ids) - 1)
        found = self._best(drafting, drafting.readers, max(0, most))
        return [] if found is None else found.rates

    def propose(self, request: Request) -> Sequence[int]:
        """Empty if drafts would cost more than they save."""
        if not self._account.affords_search or request.task != GENERATE:
            return ()
        started = time.thread_time()  # other processes do not count
        drafts = self._search(request)
        self._account.spend(time.thread_time() - started)
        return drafts

    def _search(self, request: Request) -> Sequence[int]:
        drafting = request.drafting = request.drafting or self._start(request)
        drafting.proposed = []
        most = min(MAX_DRAFTS, request.max_len - len(request.token_ids) - 1)
        for reader in drafting.readers:
            reader.read(request.token_ids)
        forced = self._forced.get(request.request_id, [])
        found = self._find(drafting, request.token_ids, forced, max(0, most))
        num_drafts, gain = self._account.best(_rates_of(found))
        if drafting.num_known == len(request.token_ids):
            predicted = self._predicted(drafting, drafting.predicted[: max(0, most)])
            number, own_gain = self._account.best(_rates_of(predicted))
            if own_gain > gain:
                found, num_drafts = predicted, number
        if not num_drafts:
            return ()
        self._account.pay(num_drafts)
        drafting.proposed = [(part.kind, len(part.token_ids)) for part in found]
        return [token for part in found for token in part.token_ids][:num_drafts]

    def _find(self, drafting: Drafting, token_ids: list[int], forced: list[int], most: int) -> list[_Found]:
        """Find tokens of a reader, or forced tokens and what a reader has after them."""
        best = self._best(drafting, drafting.readers, most)
        rate, forced = self._rate(drafting, _FORCED), forced[:most]
        if not forced or (best is not None and best.rates[0] >= rate):
            return [] if best is None else [best]
        ahead = [copy.copy(reader) for reader in drafting.readers]  # forced tokens may be wrong
        for reader in ahead:
            reader.read([*token_ids, *forced])
        following = self._best(drafting, ahead, most - len(forced))
        return [_Found(_FORCED, [rate] * len(forced), forced), *([] if following is None else [following])]

    def _best(self, drafting: Drafting, readers: Iterable[Reader], most: int) -> _Found | None:
        best: _Found | None = None
        for reader in readers:
            if token_ids := reader.tokens(most):
                kind = reader.source, reader.match_class
                found = _Found(kind, reader.rates(token_ids, self._rate(drafting, kind)), token_ids)
                best = found if best is None or found.num_expected > best.num_expected else best
        return best

    def _predicted(self, drafting: Drafting, token_ids: Sequence[int]) -> list[_Found]:
        kinds = [_kind_of_model(number) for number in range(len(token_ids))]
        rates = [self._rate(drafting, kind) for kind in kinds]
        return [_Found(kind, [rate], [token]) for kind, rate, token in zip(kinds, rates, token_ids, strict=True)]

    def predict(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Let requests of a planned step run through the model's own layer, and make drafts. requests: the running
        ones.
        """
        if self._layer is None:
            return
        running = [
            (one.start, one.num_tokens, request)
            for one in step.requests
            if (request := requests.get(one.request_id)) is not None and request.task == GENERATE
        ][: self._max_predicting]
        if not running:
            return
        num_rows = sum(count for _, count, _ in running)
        of_row = self._layer.costs.rows.seconds(num_rows) / num_rows
        of_draft = self._account.share(self._layer.costs.draft, len(running))
        for start, num_tokens, request in running:
            drafting = request.drafting = request.drafting or self._start(request)
            use, rows_left = drafting.layer, len(request.token_ids) - start
            tokens_left = request.max_len - len(request.token_ids)
            most = max(0, min(_MAX_PREDICTED, tokens_left - 2))
            rates = [self._rate(drafting, _kind_of_model(number)) for number in range(most)]
            wanted, gain = self._account.best(rates, of_draft)
            saved = worth(gain, num_tokens, rows_left, tokens_left)
            runs = self._runs_layer(request, saved, (start, num_tokens), of_row, of_draft)
            count = 0
            if num_tokens >= rows_left:
                has_others = any(kind[0] != "mtp" for kind, _ in drafting.proposed)
                count = use.count(wanted, may_draft=self._account.affords_search and most > 0 and not has_others)
            if runs:
                step.num_predicted[request.request_id] = count
                self._account.spend(count * of_draft)

    def _runs_layer(
        self, request: Request, saved: float, rows: tuple[int, int], of_row: float, of_draft: float
    ) -> bool:
        """Return whether the layer runs for a request's rows: drafts pay for them, or the allowance does.

        rows: the first one and their number.
        """
        assert self._layer is not None
        assert request.drafting is not None
        (start, count), use = rows, request.drafting.layer
        if saved <= count * of_row:
            runs = self._layer.affords(use, len(request.token_ids) - start, of_row)
            if runs and not use.runs:
                # nor would right drafts pay
                runs = self._account.best([1.0] * _MAX_PREDICTED, of_draft)[1] > of_row
            if not runs:
                use.runs = False
                return False
            self._layer.spend(count * of_row)
        if not use.runs:
            in_prompt = start < request.num_prompt_tokens
            use.begin(has_context=in_prompt or self._layer.costs.has_context)
        use.num_rows += count
        return True

    def _start(self, request: Request) -> Drafting:
        keys = _keys_of(request)
        num_prompt, prompt = request.num_prompt_tokens, request.token_ids
        readers = [Reader("own", Corpus(prompt, first=max(0, num_prompt - _MAX_INDEXED)), num_prompt)]
        if request.prediction:
            predicted = Corpus(request.prediction[:_MAX_INDEXED])
            readers.append(Reader("prediction", predicted, num_prompt, 0, _PREDICTED_MATCH))
        for source, key in keys.items():
            if (corpus := self._answers.get(key)) is not None:
                length = LONGEST_MATCH if source == "repeat" else 0
                readers.append(Reader(source, corpus, num_prompt, _start_of_last(corpus.token_ids), length))
        readers.sort(key=lambda reader: _ORDER.index(reader.source))
        return Drafting(keys, readers)

    def _rate(self, drafting: Drafting, kind: Kind) -> float:
        """Shifts from the global rate to the request's own."""
        shared = self._rates[kind]
        expected = shared.right / (shared.right + shared.wrong)
        if (own := drafting.rates.get(kind)) is None:
            return expected
        return (own.right + _TRUSTED * expected) / (own.right + own.wrong + _TRUSTED)

    def ran(self, step: SchedulerOutput, output: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
        """requests: the unfinished requests, before their tokens are appended."""
        for request_id, drafts in step.draft_token_ids.items():
            request, sampled = requests.get(request_id), output.token_ids.get(request_id)
            if request is None or sampled is None or (drafting := request.drafting) is None:
                continue
            right = sum(1 for draft, token in zip(drafts, sampled, strict=False) if draft == token)
            accepted = min(right, max(0, len(sampled) - 1))
            self.num_drafted += len(drafts)
            self.num_accepted += accepted
            drafting.num_accepted += accepted
            drafting.num_rejected += len(drafts) - accepted
            self._account.earn(accepted)
            self._note(drafting, right, len(drafts))
        self._forced = output.forced
        if self._layer is not None:
            self._note_predicted(output, requests)

    def _note_predicted(self, output: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
        """Compare the model's last drafts, checked or not, with the new tokens, and keep its next ones."""
        for request_id, sampled in output.token_ids.items():
            request = requests.get(request_id)
            if request is None or (drafting := request.drafting) is None:
                continue
            if drafting.num_known == len(request.token_ids):
                for number, (draft, token) in enumerate(zip(drafting.predicted, sampled, strict=False)):
                    self._add(drafting, _kind_of_model(number), int(draft == token), int(draft != token))
                    drafting.layer.was_right = drafting.layer.was_right or draft == token
                    if draft != token:
                        break
            drafting.predicted = output.predicted.get(request_id, [])
            drafting.num_known = len(request.token_ids) + len(sampled)

    def _add(self, drafting: Drafting, kind: Kind, right: int, wrong: int) -> None:
        self._rates[kind].add(right, wrong)
        drafting.rates.setdefault(kind, Rate(0, 0, most=16)).add(right, wrong)

    def _note(self, drafting: Drafting, right: int, num_drafts: int) -> None:
        for kind, count in drafting.proposed:
            count = min(count, num_drafts)
            if not count or right < 0:
                return
            if kind[0] != "mtp":  # `_note_predicted` counts these
                self._add(drafting, kind, min(right, count), int(right < count))
            right, num_drafts = right - count, num_drafts - count

    def learn(self, ended: Iterable[Request]) -> None:
        for request in ended:
            answer = request.token_ids[request.num_prompt_tokens :]
            if request.task != GENERATE or len(answer) < _MIN_KEPT:
                continue
            keys = _keys_of(request) if request.drafting is None else request.drafting.keys
            for key in keys.values():
                self._answers.append(key, answer)


def _kind_of_model(number: int) -> Kind:
    """number: index of a draft."""
    return "mtp", min(number, NUM_CLASSES - 1)


def _rates_of(found: Iterable[_Found]) -> list[float]:
    return [rate for part in found for rate in part.rates]


def _keys_of(request: Request) -> dict[Source, bytes]:
    root, end = request.chains[0].keys[0], request.num_prompt_tokens
    images, grammar = touched_images(request.image_spans, 0, end), request.params.grammar
    form = b"" if grammar is None else f"{grammar.kind} {grammar.text}".encode()
    prompt = block_key(root, request.token_ids[:end], images)
    keys: dict[Source, bytes] = {"repeat": answers_key(prompt, b"prompt", form)}
    if request.has_images:
        keys["image"] = answers_key(root, b"images", b"".join(span.image.key for span in request.image_spans))
    if grammar is not None:
        keys["schema"] = answers_key(root, b"grammar", form)
    return keys


def _start_of_last(token_ids: Sequence[int]) -> int:
    end = len(token_ids) - 1
    while end > 0 and token_ids[end - 1] != SEPARATOR:
        end -= 1
    return end
