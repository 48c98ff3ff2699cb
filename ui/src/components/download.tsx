/** Download: a button that saves an answer of the gateway as a file. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { download } from "../lib/download";

export function Download({ path, name, children }: { path: string; name: string; children: ComponentChildren }) {
  const [state, setState] = useState<"" | "busy" | Error>("");
  const start = () => {
    setState("busy");
    download(path, name).then(() => setState(""), setState);
  };
  return (
    <>
      <button disabled={state === "busy"} onClick={start}>
        {children}
      </button>
      {state instanceof Error && (
        <span class="error-text" role="alert">
          {state.message}
        </span>
      )}
    </>
  );
}
