"""What counts as the code of a source file: equal for other comments, different for other code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashvar_factory.build import code, source

ALIKE = [
    ("a.cuh", "int a;  // one\n\nint b;\n", "// another\nint a;\nint b;  /* two\nlines */\n"),
    ("a.cc", "  int a = 1'000;  // it's\n", "int a = 1'000;  // it is a 'thousand'\n"),
    ("a.h", "int a;  // goes on \\\n  here\nint b;\n", "int a;\nint b;\n"),
    ("a.cc", "int a;\r\n\r\nint b;\r\n", "int a;\n  int b;\n"),
    ("a.cc", "f(a,  // one\n  b);\n", "f(a,\n  // two\n  b);\n"),
    ("a.py", '"""One."""\n\n\ndef f():\n    """Two."""\n    return 1  # a\n', "def f(): return 1"),
    ("a.py", '"""Text."""\n', "# Nothing.\n"),
    ("a.cmake", "# one\n\nset(a 1)  # two\n", "#[[ three\nset(a 2) ]]\nset(a 1)\n"),
    ("CMakeLists.txt", 'set(a "#")  # "\nset(b)\n', 'set(a "#")\n  # \\\nset(b)\n'),
    ("a.toml", "# one\na = 1\n", "a = 1  # two\n"),
]
DIFFERENT = [
    ("a.cu", "int a;\n", "int b;\n"),
    ("a.cu", '#define A "// one"\n', '#define A "// two"\n'),
    ("a.cu", "#define A 1\nint a;\n", "#define A 1 int a;\n"),
    ("a.cu", "f(1'0, '\"', \"// one\");\n", "f(1'0, '\"', \"// two\");\n"),
    ("a.cu", 'auto a = R"x(// " one)x";\n', 'auto a = R"x(// " two)x";\n'),
    ("a.cu", 'auto a = u8R"(" // one)";\n', 'auto a = u8R"(" // two)";\n'),
    ("a.cu", "char a = '\\'';  int b;\n", "char a = '\\'';  int c;\n"),
    ("a.cu", "#define A \\\n\nint a;\n", "#define A \\\nint a;\n"),
    ("a.cu", "#define A \\\n  // no more\nint a;\n", "#define A \\\nint a;\n"),
    ("a.cu", "#define A \\ \n\nint a;\n", "#define A \\ \nint a;\n"),
    ("a.cu", "// one \\ \nint a;\n", "int a;\n"),
    ("a.cu", "int a; /* one\n*/ #define A 1\n", "int a;\n#define A 1\n"),
    ("a.cu", "# include /**/ <a//b>\n", "# include /**/ <a//c>\n"),
    ("a.cu", "#if __has_include(<a//b>)\n", "#if __has_include(<a//c>)\n"),
    ("a.cu", "#error don't // one\n", "#error don't // two\n"),
    ("a.cu", 'auto a = R"( one\n)";\n', 'auto a = R"(one\n)";\n'),
    ("a.cu", "#include <a//b.h>\n", "#include <a//c.h>\n"),
    ("a.cu", "#define f(x) 1\n", "#define f (x) 1\n"),
    ("a.cu", "a + +b;\n", "a ++b;\n"),
    ("a.cu", "#define A 1 /* one\n*/ 2\n", "#define A 1\n2\n"),
    ("a.cu", "a /b/ *c; // d\n", "a /b/ *e; // d\n"),
    ("a.cu", "x = a /* - b */ - c;\n", "x = a - b - c;\n"),
    ("a.py", "x = 'one'\n", "x = 'two'\n"),
    ("a.py", "def f(:  # one\n", "def f(:  # two\n"),
    ("CMakeLists.txt", "set(a 1)\n", "set(a 2)\n"),
    ("a.cmake", 'set(a "\\"# one")\n', 'set(a "\\"# two")\n'),
    ("a.cmake", "set(a [=[\n]]# one]=])\n", "set(a [=[\n]]# two]=])\n"),
    ("a.cmake", "set(a \\# one)\n", "set(a \\# two)\n"),
    ("a.cmake", "#[[ one ]] set(a 1)\n", "#[[ one ]] set(a 2)\n"),
    ("a.cmake", "# [[ one\nset(a 1)\n# ]]\n", "# [[ one\nset(a 2)\n# ]]\n"),
    ("a.toml", 'a = "# one"\n', 'a = "# two"\n'),
    ("a.toml", "a = # one\n", "a = # two\n"),
    ("a.txt", "# one\n", "# two\n"),
]


@pytest.mark.parametrize(("name", "one", "other"), ALIKE)
def test_comments_are_no_code(name: str, one: str, other: str) -> None:
    assert code.is_same(name, one.encode(), other.encode())


@pytest.mark.parametrize(("name", "one", "other"), DIFFERENT)
def test_code_is_told_apart(name: str, one: str, other: str) -> None:
    assert not code.is_same(name, one.encode(), other.encode())


def test_changed_files_are_those_of_other_code(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(**texts: str | None) -> str:
        for stem, text in texts.items():
            path = tmp_path / f"{stem}.cu"
            path.unlink() if text is None else path.write_text(text, encoding="utf-8")
        git("add", "-A")
        git("commit", "-q", "-m", "change")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    first = commit(comment="int a;  // one\n", code="int a;\n", gone="int a;\n", same="int a;\n")
    commit(comment="// two\nint a;\n", code="int b;\n", gone=None, new="// nothing\n")
    names = ["code.cu", "comment.cu", "gone.cu", "new.cu"]
    assert source.touched(tmp_path, first, ["."]) == names
    changed = [name for name in names if source.has_other_code(tmp_path, first, name)]
    assert changed == ["code.cu", "gone.cu", "new.cu"]
    assert source.touched(tmp_path, "0" * 40, ["."]) is None
