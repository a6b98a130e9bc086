"""Which namespaces a model and a salt have: found by their root keys, made for a layout that is new."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prefixcache.blocks.budget import Reservation
from prefixcache.codecs import Codec, codec_from_spec
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.keys import canonical, root_key
from prefixcache.layers.image_layout import Plan
from prefixcache.ssd.entries import NamespaceRow
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

SWEEP_AT = 1024  # from so many namespaces on, empty ones are forgotten when one is added
ROOTS = 1024  # root keys that are remembered
BASES_SHARE = (
    4  # of the RAM, that all bases in use may take: half of it is the graph's, and the rest has to hold images
)
SETTLED = 2 * 10**9  # nanoseconds after which no file can come into a folder without another time of change


class ModelCodec(NamedTuple):
    """What codes a model's rows, and its spec as JSON."""

    codec: Codec
    text: str

    @classmethod
    def of(cls, codec: Codec) -> ModelCodec:
        return cls(codec, canonical(codec.spec()))


class Namespaces:
    """The namespaces that are known, by model and salt. The storage's lock guards all but the root keys, which any
    thread may derive, and the models' codecs, which have `_codecs_lock`: a basis is read without the storage's lock.

    With codec `Transform` a model that has a basis has two codecs: the one that codes its rows, and behind it the one that
    did so before there was a basis. Images of both are hit (decision 0058).

    A namespace that an index names has a plan without a basis at first, which is enough to place its images. The plan that
    codes rows comes when the model is asked for: a directory may have many models, and bases are large.
    """

    def __init__(self, storage: Storage, codec: Codec, bases: Bases):
        self._storage = storage
        self._codec, self._bases = codec, bases
        self._usual = (ModelCodec.of(codec),)
        self._codecs: dict[str, tuple[ModelCodec, ...]] = {}  # of models, where they differ
        self._looked_at: dict[str, int] = {}  # of models without a basis: the folder as it was looked for in
        self._codecs_lock = threading.Lock()
        self._reserved: dict[str, Reservation] = {}  # RAM of the bases in use, by their hashes
        self._layouts: dict[str, set[str]] = {}  # of each model
        self._plans: dict[tuple[str, str], Plan] = {}  # by codec and layout: models and salts share them
        self._roots: dict[tuple[str, str, str, bytes], bytes] = {}
        self._sweep_at = SWEEP_AT

    def from_rows(self, rows: Iterable[NamespaceRow]) -> list[Namespace]:
        """Return the namespaces that an index names; with a warning without those whose caches this process can't make."""
        return [namespace for row in rows if (namespace := self._from_row(row)) is not None]

    def _from_row(self, row: NamespaceRow) -> Namespace | None:
        try:
            of_row = ModelCodec.of(codec_from_spec(json.loads(row.codec)))
            plan = self._plan_of(of_row, row.layout)
            with self._storage.lock:
                return self._make(row, plan)
        except Exception as error:
            log.warning("namespace %s of model %r cannot be loaded: %s", row.root.hex(), row.model, error)
            return None

    def derive_roots(self, model: str, salt: bytes) -> None:
        """Derive the root keys that `known` looks up, before it is called under the lock; look for a basis before."""
        self._look_for_basis(model)
        for of_model in self._codecs_of(model):
            for layout in tuple(self._layouts.get(model, ())):
                self._root(model, of_model, layout, salt)

    def known(self, model: str, salt: bytes) -> list[Namespace]:
        """Return the namespaces of a model and a salt that are known: those of its first codec first, one for each layout."""
        codecs = self._codecs_of(model)
        with self._storage.lock:
            namespaces = []
            for of_model in codecs:
                for layout in self._layouts.get(model, ()):
                    namespace = self._storage.namespaces.get(self._root(model, of_model, layout, salt))
                    if namespace is not None and namespace.row.stated == (model, of_model.text, layout):
                        namespaces.append(self._planned(namespace, of_model))
            return namespaces

    def of_layout(self, model: str, layout: dict[str, Any], salt: bytes) -> Namespace:
        """Return the namespace of a layout, made when it isn't there."""
        text, storage, of_model = canonical(layout), self._storage, self._codecs_of(model)[0]
        root = self._root(model, of_model, text, salt)
        with storage.lock:
            row = NamespaceRow(root, model, of_model.text, text, time.time())
            known = storage.namespaces.get(root)
            if known is not None and known.row.stated != row.stated:  # nobody else could tell, if there is a salt
                log.warning("namespace %s was forged: it is not what model %r makes; deleted", root.hex(), model)
                storage.delete_namespace(known)
            if root not in storage.namespaces:
                if len(storage.namespaces) >= self._sweep_at:
                    storage.forget_empty_namespaces()
                    self._sweep_at = max(SWEEP_AT, 2 * len(storage.namespaces))
                storage.namespaces[root] = self._make(row, self._plan_of(of_model, text))
            return self._planned(storage.namespaces[root], of_model)

    def stated(self, model: str) -> tuple[str, str]:
        return model, self._codecs_of(model)[0].text

    def layouts_of(self, model: str) -> Sequence[str]:
        return tuple(self._layouts.get(model, ()))

    def learn(self, model: str, layout: str, salt: bytes) -> None:
        try:
            parsed = json.loads(layout)
            if canonical(parsed) != layout:
                raise ValueError("it is not as a cache writes it")
            self.of_layout(model, parsed, salt)
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def recorded_root(self, model: str, salt: bytes) -> bytes:
        """Return what a recording's ids begin from: the same for all layouts, and so before a namespace or basis is known."""
        return self._root(model, self._usual[0], "{}", salt)

    def codec_of(self, model: str) -> Codec:
        """Return what codes a model's rows."""
        self._look_for_basis(model)
        return self._codecs_of(model)[0].codec

    def _make(self, row: NamespaceRow, plan: Plan) -> Namespace:
        self._layouts.setdefault(row.model, set()).add(row.layout)
        has_snapshots = bool(plan.snapshots)
        keeps_tails = not (plan.lossless or has_snapshots)
        return Namespace(row, plan, self._storage.graph.tree(row.root, plan.windows, has_snapshots, keeps_tails))

    def _planned(self, namespace: Namespace, of_model: ModelCodec) -> Namespace:
        """Return the namespace with the plan that codes its rows."""
        row = namespace.row
        plan = self._plan_of(of_model, row.layout)
        if namespace.plan is not plan:
            self._storage.namespaces[row.root] = namespace = namespace._replace(plan=plan)
        return namespace

    def _plan_of(self, of_model: ModelCodec, layout: str) -> Plan:
        plan = self._plans.get((of_model.text, layout))
        if plan is None:
            plan = Plan(json.loads(layout), of_model.codec)
            plan.check_classes()
            self._plans[of_model.text, layout] = plan
        return plan

    def _root(self, model: str, of_model: ModelCodec, layout: str, salt: bytes) -> bytes:
        known = self._roots.get((model, of_model.text, layout, salt))
        if known is None:
            known = root_key(model, of_model.codec.spec(), json.loads(layout), salt)
            if len(self._roots) >= ROOTS:
                self._roots.clear()
            self._roots[model, of_model.text, layout, salt] = known
        return known

    def _codecs_of(self, model: str) -> tuple[ModelCodec, ...]:
        """Return the codec of a model's rows, and behind it one whose older images are hit, too. The first call for a model
        may read its basis: `derive_roots` makes that call before the storage's lock is taken.
        """
        if not isinstance(self._codec, Transform):
            return self._usual
        if model not in self._codecs:
            self._look_for_basis(model)
        return self._codecs[model]

    def _look_for_basis(self, model: str) -> None:
        """Look for a basis of a model that has none, where the folder has changed since it was looked for."""
        if not isinstance(self._codec, Transform) or len(self._codecs.get(model, ())) > 1:  # it has one
            return
        changed = self._bases.changed_at()
        if changed == self._looked_at.get(model):
            return
        with self._codecs_lock:
            known = self._codecs.get(model, ())
            if len(known) > 1:
                return
            codec = self._within_budget(self._codec.for_model(model, self._bases), model)
            codecs: list[Codec] = [codec, codec.otherwise] if isinstance(codec, Calibrated) else [codec]
            self._codecs[model] = tuple(map(ModelCodec.of, codecs))
            if time.time_ns() - changed > SETTLED:
                self._looked_at[model] = changed
        if known and isinstance(codec, Calibrated):
            log.info("model %s: a basis was made, and codes its rows from now on: %s", model, codec)

    def _within_budget(self, codec: Codec, model: str) -> Codec:
        """Return the codec, once RAM has room for its basis; without it what codes the rows otherwise."""
        if not isinstance(codec, Calibrated) or codec.basis.hash in self._reserved:
            return codec
        room = reserve_basis(self._storage, codec.basis, sum(reserved.left for reserved in self._reserved.values()))
        if room is None:
            log.warning(
                "the basis of model %r takes %d bytes of RAM, and all bases in use may take 1/%d of its %d bytes: the "
                "model's rows are coded by %s; give more ram",
                model,
                codec.basis.nbytes,
                BASES_SHARE,
                self._storage.ram.configured,
                codec.otherwise,
            )
            return codec.otherwise
        self._reserved[codec.basis.hash] = room
        return codec


def reserve_basis(storage: Storage, basis: Basis, taken: int) -> Reservation | None:
    """Reserve RAM for a basis, beside the `taken` bytes of others; None where bases would take more than their share."""
    if taken + basis.nbytes > storage.ram.configured // BASES_SHARE:
        return None
    return storage.ram.reserve(basis.nbytes)
