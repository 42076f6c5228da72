"""Makes exchanges of coding agents with files and commands: a request, calls, their results, and an answer."""

from __future__ import annotations

import re
from random import Random

from attrs import frozen

from training.chat_format import Message, user
from training.chat_format import assistant as says
from training.tools import Tool, call
from training.words import Source, value

_DEFINES = re.compile(r"^ *(?:def|class) (\w+).*$", re.MULTILINE)
_PATHS = ("path", "file_path", "filePath", "filename", "file")


def tool_says(content: str) -> Message:
    return {"role": "tool", "content": content}


@frozen
class FileTools:
    """Tools to read files, write files, find text and run commands, under one of the names that agents use."""

    read: str
    write: str
    find: str
    run: str
    path: str
    content: str
    pattern: str
    command: str

    @staticmethod
    def of(rng: Random) -> FileTools:
        return FileTools(
            read=rng.choice(("read", "Read", "read_file", "view", "open_file", "cat", "get_file_contents")),
            write=rng.choice(("write", "Write", "write_file", "create_file", "save_file")),
            find=rng.choice(("grep", "Grep", "search_files", "find_text", "rg", "codebase_search")),
            run=rng.choice(("bash", "Bash", "run_command", "shell", "exec_command", "terminal")),
            path=rng.choice(_PATHS),
            content=rng.choice(("content", "content", "text", "file_text", "contents")),
            pattern=rng.choice(("pattern", "pattern", "query", "regex")),
            command=rng.choice(("command", "command", "cmd", "script")),
        )

    def schemas(self) -> list[Message]:
        tools = (
            Tool(self.read, "Reads a file from the disk.", {self.path: "string"}, ()),
            Tool(self.write, "Writes a file to the disk.", {self.path: "string", self.content: "string"}, ()),
            Tool(self.find, "Finds the lines of all files that contain a text.", {self.pattern: "string"}, ()),
            Tool(self.run, "Runs a shell command.", {self.command: "string"}, ()),
        )
        return [tool.schema() for tool in tools]

    def exchange(self, rng: Random, source: Source) -> list[Message]:
        make = rng.choice(
            (self._ask_definition, self._ask_place, self._ask_setting, self._ask_copy, self._ask_file, self._ask_output)
        )
        return make(rng, source, path(rng, source))

    def _ask_definition(self, rng: Random, source: Source, file: str) -> list[Message]:
        """Ask for the line of a file that defines a name."""
        text = source.excerpt(rng, rng.choice((400, 1500, 4000)))
        names = _DEFINES.findall(text)
        once_only = [name for name in names if names.count(name) == 1]
        if not once_only:
            return self._ask_setting(rng, source, file)
        name = rng.choice(once_only)
        line = next(match[0].strip() for match in _DEFINES.finditer(text) if match[1] == name)
        ask = rng.choice(
            (f"Which line of {file} defines {name}?", f"Read {file} and show me the line that defines {name}.")
        )
        return [user(ask), call((self.read, {self.path: file})), tool_says(text), says(line)]

    def _ask_place(self, rng: Random, source: Source, file: str) -> list[Message]:
        """Ask for a value that has to be found among files first."""
        name, line = setting(rng, source)
        ask = rng.choice((f"Find {name} and tell me its value.", f"Where is {name} set, and to what?"))
        others = "".join(f"{path(rng, source)}:{rng.randrange(1, 400)}:{name}\n" for _ in range(rng.randrange(3)))
        found = f"{others}{file}:{rng.randrange(1, 400)}:{name} = {line}"
        if rng.random() < 0.5:
            return [
                user(ask),
                call((self.find, {self.pattern: name})),
                tool_says(found),
                says(f"{name} is set in {file} to {line}."),
            ]
        text = hide_line(rng, source, f"{name} = {line}")
        return [
            user(ask),
            call((self.find, {self.pattern: name})),
            tool_says(file),
            call((self.read, {self.path: file})),
            tool_says(text),
            says(f"{name} is set in {file} to {line}."),
        ]

    def _ask_setting(self, rng: Random, source: Source, file: str) -> list[Message]:
        """Ask for the value of a name in a file."""
        name, line = setting(rng, source)
        ask = rng.choice(
            (f"What is {name} in {file}?", f"Read {file}. What is {name}?", f"Tell me {name} from {file}.")
        )
        text = hide_line(rng, source, rng.choice((f"{name} = {line}", f"{name}: {line}")))
        return [user(ask), call((self.read, {self.path: file})), tool_says(text), says(f"{name} is {line}.")]

    def _ask_copy(self, rng: Random, source: Source, file: str) -> list[Message]:
        """Ask to write a value of one file to another one."""
        name, line = setting(rng, source)
        other = path(rng, source)
        return [
            user(
                rng.choice((f"Write the value of {name} in {file} to {other}.", f"Copy {name} from {file} to {other}."))
            ),
            call((self.read, {self.path: file})),
            tool_says(hide_line(rng, source, f"{name} = {line}")),
            call((self.write, {self.path: other, self.content: line})),
            tool_says(rng.choice(("ok", "done", "File written.", f"Wrote {len(line)} bytes to {other}"))),
            says(f"I have written {line} to {other}."),
        ]

    def _ask_file(self, rng: Random, source: Source, file: str) -> list[Message]:
        text = rng.choice((" ".join(source.words(rng, rng.randint(1, 6))), source.excerpt(rng, 120).strip("\n")))
        ask = rng.choice((f"Write this to {file}:\n{text}", f"Create {file} with this content:\n```\n{text}\n```"))
        done = tool_says(rng.choice(("ok", "done", "File written.", "")))
        written = call((self.write, {self.path: file, self.content: text}))
        return [user(ask), written, done, says(f"I have written {file}.")]

    def _ask_output(self, rng: Random, source: Source, _file: str) -> list[Message]:
        word, other = source.words(rng, 2)
        command = rng.choice((f"echo {word}", f"ls {word.lower()}", f"wc -l {path(rng, source)}", "git status", "pwd"))
        command = rng.choice((command, f"python {other.lower()}.py", "make test", "pytest -q", f"git show {word}"))
        printed = rng.choice((value(rng, word), " ".join(source.words(rng, 5)), source.excerpt(rng, 80).strip("\n")))
        ask = rng.choice(
            (f"Run {command}.", f"Run `{command}` and show me what it prints.", f"What does {command} say?")
        )
        answer = f"It printed:\n```\n{printed}\n```"
        return [user(ask), call((self.run, {self.command: command})), tool_says(printed), says(answer)]


def path(rng: Random, source: Source) -> str:
    folder, name = source.words(rng, 2)
    file = f"{name.lower()}.{rng.choice(('py', 'txt', 'md', 'json', 'toml', 'c', 'yaml'))}"
    return rng.choice(
        (file, f"{folder.lower()}/{file}", f"src/{folder.lower()}/{file}", f"/home/{folder.lower()}/{file}")
    )


def setting(rng: Random, source: Source) -> tuple[str, str]:
    """Draw a name and its value."""
    word, other = source.words(rng, 2)
    return rng.choice((word.upper(), f"{word}_{other}".lower(), f"{word}_{other}".upper(), other)), value(rng, word)


def hide_line(rng: Random, source: Source, line: str) -> str:
    """Return the line, alone or somewhere in a text."""
    if rng.random() < 0.3:
        return line
    lines = source.excerpt(rng, rng.choice((200, 800, 3000))).splitlines()
    lines.insert(rng.randrange(len(lines) + 1), line)
    return "\n".join(lines)
