/** Copy as: the same question on the command line, in Python, and by curl. */
import { useState } from "preact/hooks";
import { BASE } from "../lib/api";
import { key } from "../lib/session";

export interface Ways {
  cli?: string;
  python?: string;
  /** A path of the API, for a GET by curl. */
  path?: string;
}

export function CopyAs({ cli, python, path }: Ways) {
  const [done, setDone] = useState("");
  const auth = key.value ? ' -H "Authorization: Bearer $CRAY_AGENTS_API_KEY"' : "";
  const ways: [string, string | undefined][] = [
    ["command line", cli],
    ["Python", python],
    ["curl", path && `curl -s${auth} '${BASE}${path}'`],
  ];
  const copy = async (name: string, text: string) => {
    await navigator.clipboard.writeText(text).then(
      () => setDone(name),
      () => setDone(""),
    );
  };
  return (
    <details class="copy-as">
      <summary>Copy as …</summary>
      <div class="sheet">
        {ways.map(
          ([name, text]) =>
            text && (
              <div key={name}>
                <button onClick={() => void copy(name, text)}>{done === name ? "Copied" : `Copy: ${name}`}</button>
                <code>{text}</code>
              </div>
            ),
        )}
      </div>
    </details>
  );
}

/** Quote a word for a shell. */
export function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`;
}
