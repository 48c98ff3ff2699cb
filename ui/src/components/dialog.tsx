/** Dialog: a modal of the browser's own, which keeps the focus within and ends with Escape. */
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

export function Dialog(props: { title: string; close: () => void; children: ComponentChildren }) {
  const ref = useRef<HTMLDialogElement>(null);
  // Before the next key comes: what is typed at once belongs to the dialog.
  useLayoutEffect(() => {
    const dialog = ref.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={ref}
      aria-label={props.title}
      onClose={props.close}
      onClick={(event) => event.target === ref.current && props.close()}
    >
      <div class="dialog">
        <header>
          <h2>{props.title}</h2>
          <button onClick={props.close} aria-label="Close">
            ✕
          </button>
        </header>
        {props.children}
      </div>
    </dialog>
  );
}
