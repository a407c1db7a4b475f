"""The papers whose tables are reproduced: {name: module:function} of each benchmark."""

PAPERS = {
    "bros": "headway.bench.papers.bros:main",
    "ecoserve": "headway.bench.papers.ecoserve:main",
    "qlm": "headway.bench.papers.qlm:main",
}
