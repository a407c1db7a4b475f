"""The papers whose tables are reproduced: {name: module:function} of each benchmark."""

PAPERS = {
    "anneal": "headway.bench.papers.anneal:main",
    "bros": "headway.bench.papers.bros:main",
    "ecoserve": "headway.bench.papers.ecoserve:main",
    "hermes": "headway.bench.papers.hermes:main",
    "hermes-caches": "headway.bench.papers.hermes_caches:main",
    "qlm": "headway.bench.papers.qlm:main",
}
# Those whose `main` takes `only`.
PARTED = ("bros", "ecoserve", "hermes", "qlm")
