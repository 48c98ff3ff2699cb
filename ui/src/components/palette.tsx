/** Command palette: go to a screen, to a run by its id, or search the texts of runs. */
import { useState } from "preact/hooks";
import { go, href } from "../lib/route";
import { may } from "../lib/session";
import { screens } from "../lib/screen_list";
import { Dialog } from "./dialog";

interface Command {
  label: string;
  fragment: string;
}

function commands(text: string): Command[] {
  const words = text.trim();
  const lower = words.toLowerCase();
  const known = screens.value.filter((one) => one.menu && may(one.role) && one.title.toLowerCase().includes(lower)).map(
    (one) => ({ label: one.title, fragment: href([one.name]) }),
  );
  if (!words) return known;
  const made: Command[] = [];
  if (/^[A-Za-z0-9][\w.:@-]*$/.test(words)) {
    made.push({ label: `Open the run with the id ${words}`, fragment: href(["run", words]) });
    for (const screen of screens.value.filter((one) => one.opens && may(one.role))) {
      made.push({ label: `Open the ${screen.opens} with the id ${words}`, fragment: href([screen.name, words]) });
    }
  }
  if (may("train")) {
    made.push({ label: `Search the texts of runs for "${words}"`, fragment: href(["search"], { q: words }) });
    made.push({ label: `List runs with the filter "${words}"`, fragment: href(["runs"], { q: words }) });
  }
  return [...known, ...made];
}

export function Palette({ close }: { close: () => void }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const list = commands(text);
  const chosen = Math.min(at, list.length - 1);
  const open = (command: Command | undefined) => {
    if (!command) return;
    close();
    go(command.fragment);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown") setAt(Math.min(chosen + 1, list.length - 1));
    else if (event.key === "ArrowUp") setAt(Math.max(chosen - 1, 0));
    else if (event.key === "Enter") open(list[chosen]);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog title="Go to" close={close}>
      <input
        class="wide"
        autofocus
        type="text"
        role="combobox"
        aria-label="Screen, run id, or words"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={list.length ? `palette-${chosen}` : undefined}
        placeholder="Screen, run id, or words"
        value={text}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setAt(0);
        }}
        onKeyDown={onKeyDown}
      />
      <ul id="palette-list" class="palette" role="listbox" aria-label="Commands">
        {list.map((command, n) => (
          <li
            key={command.label}
            id={`palette-${n}`}
            role="option"
            aria-selected={n === chosen}
            onClick={() => open(command)}
          >
            {command.label}
          </li>
        ))}
      </ul>
    </Dialog>
  );
}
