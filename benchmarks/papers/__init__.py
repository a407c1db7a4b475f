"""The papers whose tables are reproduced: {name: module:function} of each benchmark."""

PAPERS = {
    "anneal": "benchmarks.papers.anneal:main",
    "bros": "benchmarks.papers.bros:main",
    "ecoserve": "benchmarks.papers.ecoserve:main",
    "hermes": "benchmarks.papers.hermes:main",
    "hermes-caches": "benchmarks.papers.hermes_caches:main",
    "qlm": "benchmarks.papers.qlm:main",
}
# Those whose `main` takes `only`.
PARTED = ("bros", "ecoserve", "hermes", "qlm")
