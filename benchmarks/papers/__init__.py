"""The papers whose evaluations are reproduced: {name: module:function} of each benchmark."""

PAPERS = {
    name: f"benchmarks.papers.{name.replace('-', '_')}:main"
    for name in ("anneal", "bros", "ecoserve", "hermes", "hermes-caches", "qlm")
}
# Benchmarks whose `main` takes `seeds`.
SEEDED = ("bros", "hermes", "hermes-caches", "qlm")
