/** Help: the keys that work now. */
import { activeShortcuts, setShortcutsOn, shortcutsOn } from "../lib/keyboard";
import { Dialog } from "./dialog";

export function Help({ close }: { close: () => void }) {
  return (
    <Dialog title="Keys" close={close}>
      <dl class="keys">
        {activeShortcuts().map(([key, about]) => (
          <div key={key}>
            <dt>
              <kbd>{key.replace("mod+", "Ctrl/⌘ ")}</kbd>
            </dt>
            <dd>{about}</dd>
          </div>
        ))}
      </dl>
      <label>
        <input
          type="checkbox"
          checked={shortcutsOn.value}
          onChange={(event) => setShortcutsOn(event.currentTarget.checked)}
        />{" "}
        keys of one letter
      </label>
      <p>
        Every address holds all that is seen: filters, turn and token. Copy it to show somebody the same. A tab that is
        hidden asks for nothing.
      </p>
    </Dialog>
  );
}
