"""Text files to JSON lines, as `megatron-fanformer prepare` reads them: a file is a document, in the paths' order.

python examples/text_to_jsonl.py docs .md runs/own/documents.jsonl
"""

import json
import sys
from pathlib import Path

if len(sys.argv) != 4 or not Path(sys.argv[1]).is_dir():
    sys.exit(f"name a folder, the ending of its text files and the file to write: python {sys.argv[0]} FOLDER .md FILE")
folder, ending, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
output.parent.mkdir(parents=True, exist_ok=True)
documents = 0
with output.open("w", encoding="utf-8") as lines:
    for path in sorted(folder.rglob(f"*{ending}")):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            sys.exit(f"{path} is not UTF-8 at byte {error.start}; write it in that, or move it elsewhere")
        lines.write(json.dumps({"id": str(path), "text": text}) + "\n")
        documents += 1
print(f"{output}: {documents} documents")
