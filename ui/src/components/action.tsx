/** Action: a change of the platform, in a dialog that asks for its reason and shows its command line. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { tell } from "../lib/events";
import { Dialog } from "./dialog";

export function Action(props: {
  title: string;
  /** The same on the command line, for this reason. */
  cli: (reason: string) => string;
  act: (reason: string) => Promise<unknown>;
  close: () => void;
  danger?: boolean;
  /** The reason must be given. */
  needsReason?: boolean;
  children?: ComponentChildren;
}) {
  const [reason, setReason] = useState("");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await props.act(reason.trim());
      tell({ kind: "*", id: "", change: "action" });
      props.close();
    } catch (problem) {
      setError((problem as Error).message);
    }
    setBusy(false);
  };
  return (
    <Dialog title={props.title} close={props.close}>
      <form class="form" onSubmit={submit}>
        {props.children}
        <label>
          Reason{props.needsReason ? "" : " (may be empty)"}
          <textarea rows={2} value={reason} onInput={(event) => setReason(event.currentTarget.value)} />
        </label>
        <p class="hint">
          On the command line: <code>{props.cli(reason.trim())}</code>
        </p>
        {busy && <p role="status">Waiting for the platform …</p>}
        {error && (
          <p class="failure" role="alert">
            {error}
          </p>
        )}
        <div class="row">
          <button class={props.danger ? "danger" : "primary"} disabled={busy || (props.needsReason && !reason.trim())}>
            {props.title}
          </button>
          <button type="button" onClick={props.close}>
            Back
          </button>
        </div>
      </form>
    </Dialog>
  );
}
