# SPDX-License-Identifier: MIT
"""Writes packages/torch/API.md and packages/jax/API.md: every public function and class, with its signature and docstring, read
from the sources without importing them. `python packages/api.py --check` writes nothing, and says which page is old."""
import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
# For each page: its title, and its parts: a heading, what stands before a name, the file, and which names (a regular expression).
PAGES = {
    "torch": ("lk_torch", [
        ("Functions", "LF", "functional.py", "[a-z]"), ("Modules", "lk_torch", "nn.py", "[A-Z]"),
        ("Models of transformers", "lk_torch", "_patch.py", "(patch|unpatch|Patched)$"), ("Results", "LF", "functional.py", "[A-Z]")]),
    "jax": ("lk_jax", [
        ("Functions", "lk", "__init__.py", "[a-z]"), ("What was built", "lk", "_ffi.py", "(platform|targets)$"),
        ("Results", "lk", "__init__.py", "[A-Z]")]),
}
INTRODUCTION = {
    "torch": "`LF` is `lk_torch.functional`. [README](README.md) says how to build lk_torch, and how it differs from PyTorch's functions.",
    "jax": "`lk` is `lk_jax`. [README](README.md) says how to build lk_jax, and how it differs from JAX's functions.",
}


def prose(text):
    """A docstring as Markdown: an indented block is code, and in the rest no character is markup."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text))
    out = []
    for block in blocks:
        if all(line.startswith("    ") for line in block.split("\n")):
            out.append("```python\n" + textwrap.dedent(block) + "\n```")
        else:
            out.append(re.sub(r"([*<>\\]|(?<=\])\()", r"\\\1", block))
    return "\n\n".join(out)


def signature(name, node):
    """As a call, without self, in lines of at most 120 characters."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg == "self":
        arguments.args.pop(0)
    parts, depth, part = [], 0, ""
    for c in ast.unparse(arguments):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    line, lines = f"{name}(", []
    for i, text in enumerate([*parts, part.strip()]):
        text += ")" if i == len(parts) else ","
        if len(line) + len(text) > 118:
            lines.append(line.rstrip())
            line = " " * (len(name) + 1)
        line += text + " "
    return "\n".join([*lines, line.rstrip()])


def entries(where, path, names):
    """(name, Markdown) of what is public in a file."""
    for node in ast.parse(path.read_text()).body:
        name, text = getattr(node, "name", "_"), ast.get_docstring(node, clean=False) if hasattr(node, "name") else None
        if text is None or not re.match(f"({names})", name):
            continue
        full = f"{where}.{name}"
        if isinstance(node, ast.FunctionDef):
            yield name, f"```python\n{signature(full, node)}\n```\n\n{prose(text)}"
            continue
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
        methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        lines = []
        if fields:
            lines.append(f"{name}({', '.join(fields)})    # a NamedTuple")
        elif "__init__" in methods:
            lines.append(signature(full, methods["__init__"]))
        if "forward" in methods:
            lines.append(signature(f"{name}.forward", methods["forward"]))
        code = "```python\n" + "\n".join(lines) + "\n```\n\n" if lines else ""
        more = [f"```python\n{signature(f'{name}.{n}', method)}\n```\n\n{prose(ast.get_docstring(method, clean=False))}"
                for n, method in methods.items() if not n.startswith("_") and n != "forward" and ast.get_docstring(method)]
        yield name, code + "\n\n".join([prose(text), *more])


def page(package):
    title, parts = PAGES[package]
    found = [(heading, list(entries(where, HERE / package / title / file, names))) for heading, where, file, names in parts]
    out = [f"# {title}, every function", "`make api-pages` writes this page from the docstrings. " + INTRODUCTION[package]]
    seen = []

    def anchor(name):
        """Of headings that differ in their case alone, as glu and GLU do, the second one has a number."""
        seen.append(name.lower())
        before = seen.count(name.lower()) - 1
        return name.lower() + (f"-{before}" if before else "")
    out += [f"**{heading}**: " + " · ".join(f"[{name}](#{anchor(name)})" for name, _ in of) for heading, of in found]
    for heading, of in found:
        out += [f"## {heading}", *(f"### {name}\n\n{text}" for name, text in of)]
    return "\n\n".join(out) + "\n"


def main():
    for package in PAGES:
        path, text = HERE / package / "API.md", page(package)
        if "--check" not in sys.argv:
            path.write_text(text)
            print(f"lk: wrote packages/{package}/API.md, {text.count(chr(10))} lines")
        elif not path.exists() or path.read_text() != text:
            print(f"packages/{package}/API.md is not what the docstrings say now: make api-pages")


if __name__ == "__main__":
    main()
