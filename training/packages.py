"""The packages whose source is the corpus, with their licences, and those whose source is used in exams only."""

from __future__ import annotations

PACKAGES = {
    "aiofiles": "Apache-2.0", "annotated-types": "MIT", "anyio": "MIT", "cattrs": "MIT", "contourpy": "BSD-3-Clause",
    "cycler": "BSD-3-Clause", "cyclopts": "Apache-2.0", "docstring-parser": "MIT", "filelock": "MIT",
    "fonttools": "MIT", "fsspec": "BSD-3-Clause", "grimp": "BSD-2-Clause", "h11": "MIT", "httpcore": "BSD-3-Clause",
    "httpx": "BSD-3-Clause", "huggingface-hub": "Apache-2.0", "idna": "BSD-3-Clause",
    "import-linter": "BSD-2-Clause", "iniconfig": "MIT", "Jinja2": "BSD-3-Clause", "markdown-it-py": "MIT",
    "MarkupSafe": "BSD-3-Clause", "matplotlib": "Matplotlib (PSF-based)", "mdurl": "MIT", "mpmath": "BSD-3-Clause",
    "mypy": "MIT", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause", "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pillow": "MIT-CMU", "platformdirs": "MIT", "pluggy": "MIT", "prometheus-client": "Apache-2.0",
    "pydantic": "MIT", "pydantic-core": "MIT", "Pygments": "BSD-2-Clause", "pytest": "MIT", "PyYAML": "MIT",
    "regex": "Apache-2.0 AND CNRI-Python", "rich-rst": "MIT", "safetensors": "Apache-2.0", "setuptools": "MIT",
    "sortedcontainers": "Apache-2.0", "sympy": "BSD-3-Clause", "tokenizers": "Apache-2.0", "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0", "truststore": "MIT", "typer": "MIT", "typing-extensions": "PSF-2.0",
    "typing-inspection": "MIT", "uvicorn": "BSD-3-Clause", "zstandard": "BSD-3-Clause",
}  # fmt: skip
"""What is read if it is installed: packages that the project pins, under permissive licences."""

MORE = {
    "aiohttp": "Apache-2.0 AND MIT", "alembic": "MIT", "APScheduler": "MIT", "arrow": "Apache-2.0",
    "beautifulsoup4": "MIT", "black": "MIT", "boltons": "BSD-3-Clause", "bottle": "MIT", "celery": "BSD-3-Clause",
    "CherryPy": "BSD-3-Clause", "coverage": "Apache-2.0", "dask": "BSD-3-Clause", "Django": "BSD-3-Clause",
    "dnspython": "ISC", "fastapi": "MIT", "Flask": "BSD-3-Clause", "gunicorn": "MIT", "hatch": "MIT",
    "html5lib": "MIT", "icalendar": "BSD-2-Clause", "invoke": "BSD-2-Clause", "ipython": "BSD-3-Clause",
    "jedi": "MIT", "kombu": "BSD-3-Clause", "lark": "MIT", "loguru": "MIT", "Markdown": "BSD-3-Clause",
    "marshmallow": "MIT", "mistune": "BSD-3-Clause", "more-itertools": "MIT", "nltk": "Apache-2.0",
    "nox": "Apache-2.0", "oauthlib": "BSD-3-Clause", "parso": "MIT", "pexpect": "ISC", "prettytable": "BSD-3-Clause",
    "prompt-toolkit": "BSD-3-Clause", "pyasn1": "BSD-2-Clause", "pycparser": "BSD-3-Clause", "PyJWT": "MIT",
    "pymongo": "Apache-2.0", "PyMySQL": "MIT", "redis": "MIT", "requests": "Apache-2.0", "sanic": "MIT",
    "Scrapy": "BSD-3-Clause", "Sphinx": "BSD-2-Clause", "SQLAlchemy": "MIT", "structlog": "MIT OR Apache-2.0",
    "textual": "MIT", "tinydb": "MIT", "toolz": "BSD-3-Clause", "tornado": "Apache-2.0", "tox": "MIT",
    "trio": "MIT OR Apache-2.0", "Twisted": "MIT", "urllib3": "MIT", "websockets": "BSD-3-Clause",
    "Werkzeug": "BSD-3-Clause", "xarray": "Apache-2.0",
}  # fmt: skip
"""Read as well where `make train-demo` puts them: many authors, so that code of others is no surprise. Nothing of the
project needs them; corpus.txt beside this file says which versions."""

APART = ("attrs", "click", "pyparsing", "python-dateutil", "rich", "starlette", "tqdm")
"""Packages of other authors, pinned by the project, of which no file is read for training: exams ask about them."""
