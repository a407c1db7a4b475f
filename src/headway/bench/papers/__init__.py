"""Which papers can be shown again? Name -> the benchmark's main."""

PAPERS = {"bros": "headway.bench.papers.bros:main", "ecoserve": "headway.bench.papers.ecoserve:main"}
