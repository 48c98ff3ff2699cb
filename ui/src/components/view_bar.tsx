/** View bar: what a script with this page's key shows here, and why each of its marks is there. */
import { oneLine } from "../lib/format";
import { href } from "../lib/route";
import { openView, view, waits } from "../lib/shown_view";

const MOST = 8; // marks that are named

export function ViewBar() {
  const shown = view.value;
  if (!shown) return null;
  return (
    <div class="view-bar row" role="status" aria-label="Shown by your key">
      <span>{waits.value ? "Your key wants to show something:" : "Shown by your key:"}</span>
      {shown.highlight.slice(0, MOST).map((mark, n) => (
        <a key={n} href={href(["run", shown.run ?? ""], { t: mark.turn })}>
          turn {mark.turn}: {oneLine(mark.reason || mark.quote, 100)}
        </a>
      ))}
      {shown.highlight.length > MOST && <span>and {shown.highlight.length - MOST} more</span>}
      {(waits.value || !shown.highlight.length) && (
        <button onClick={() => openView(shown)}>{waits.value ? "Show it" : oneLine(shown.url, 80)}</button>
      )}
      <span class="spacer" />
      <button onClick={() => (view.value = null)}>Dismiss</button>
    </div>
  );
}
