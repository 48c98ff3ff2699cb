/** Sign-in: asks for an API key, which stays in this tab. */
import { useState } from "preact/hooks";
import { clearKey, keyAskedFor, setKey } from "../lib/session";
import { whoami } from "../lib/sign_in";

export function SignIn() {
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setKey(text.trim());
    try {
      await whoami();
    } catch (error) {
      clearKey((error as Error).message);
    }
    setBusy(false);
  };
  return (
    <main class="sign-in">
      <h1>cray-agents</h1>
      <p role="status">{keyAskedFor.value}</p>
      <form onSubmit={submit}>
        <label>
          API key
          <input
            class="wide"
            type="password"
            autocomplete="off"
            spellcheck={false}
            value={text}
            onInput={(event) => setText(event.currentTarget.value)}
          />
        </label>
        <button class="primary" disabled={busy || !text.trim()}>
          Sign in
        </button>
      </form>
      <p>
        <code>cray-agents dashboard</code> opens this page signed in. <code>cray-agents keys create NAME</code> makes a
        key. The key is kept in this tab only, and is gone when the tab is closed.
      </p>
    </main>
  );
}
