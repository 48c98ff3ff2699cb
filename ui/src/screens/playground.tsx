/** Playground: talk to one version or to two side by side. Each answer is recorded as a run of its own. */
import { useEffect, useRef, useState } from "preact/hooks";
import { MessageView } from "../components/message";
import { ScreenLink } from "../components/screen_link";
import { NotShown } from "../components/states";
import { get, request } from "../lib/api";
import { parseJson } from "../lib/exact_json";
import { oneLine } from "../lib/format";
import type { Message } from "../lib/records";
import { useResource } from "../lib/resource";
import type { ScreenProps } from ".";

interface Answer {
  model: string;
  message: Message;
  run: string | null;
  error?: string;
}

const TAG = "playground";

export default function Playground({ params }: ScreenProps) {
  const models = useResource((signal) => get("/v1/models", { signal }), [], ["model"]);
  const names = (models.data?.data ?? []).map((one) => (one as { id: string }).id);
  const [chosen, setChosen] = useState([params.get("model") ?? "", params.get("other") ?? ""]);
  const [messages, setMessages] = useState<Message[]>([]);
  const [text, setText] = useState("");
  const [system, setSystem] = useState("");
  const [tools, setTools] = useState("");
  const [temperature, setTemperature] = useState("1");
  const [most, setMost] = useState("512");
  const [answers, setAnswers] = useState<Answer[]>([]);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const controller = useRef<AbortController | null>(null);
  useEffect(() => () => controller.current?.abort(), []);
  const [run, turn] = [params.get("run"), Number(params.get("t") ?? 0)];
  useEffect(() => {
    if (!run) return;
    const abort = new AbortController();
    get("/v1/trajectories/{run_id}/turns", {
      path: { run_id: run },
      query: { from: turn, limit: 1, full: true },
      signal: abort.signal,
    }).then(
      (page) => {
        const found = page.data[0];
        if (!found) return;
        setMessages(found.messages as unknown as Message[]);
        setTools(found.tools?.length ? JSON.stringify(found.tools, null, 1) : "");
        setChosen(([first, second]) => [first || found.model || "", second ?? ""]);
      },
      (error: Error) => abort.signal.aborted || setProblem(error.message),
    );
    return () => abort.abort();
  }, [run, turn]);
  const send = async (event: Event) => {
    event.preventDefault();
    let defined: unknown;
    try {
      defined = tools.trim() ? parseJson(tools) : undefined;
    } catch (error) {
      return setProblem(`The tools are no JSON: ${(error as Error).message}`);
    }
    const sent: Message[] = [
      ...(system && !messages.length ? [{ role: "system", content: system }] : []),
      ...messages,
      ...(text.trim() ? [{ role: "user", content: text }] : []),
    ];
    if (!sent.length) return setProblem("There is nothing to send.");
    setProblem("");
    setBusy(true);
    setText("");
    setMessages(sent);
    controller.current = new AbortController();
    const { signal } = controller.current;
    const body = { messages: sent, temperature: Number(temperature), max_tokens: Number(most), ...(defined ? { tools: defined } : {}) };
    const models = [chosen[0] || names[0] || "", chosen[1] ?? ""].filter(Boolean);
    const made = await Promise.all(models.map((model) => ask(model, body, signal)));
    setAnswers(made);
    if (made.length === 1 && made[0] && !made[0].error) setMessages([...sent, made[0].message]);
    setBusy(false);
  };
  return (
    <>
      <div class="row">
        <h1>Playground</h1>
        {[0, 1].map((n) => (
          <label key={n}>
            {n ? "beside " : "Model "}
            <input
              list="playground-models"
              value={chosen[n]}
              placeholder={n ? "none" : (names[0] ?? "")}
              onInput={(event) => setChosen(chosen.map((one, m) => (m === n ? event.currentTarget.value : one)))}
            />
          </label>
        ))}
        <datalist id="playground-models">
          {names.slice(0, 200).map((name) => (
            <option key={name} value={name} />
          ))}
        </datalist>
        <label>
          Temperature{" "}
          <input type="number" min="0" step="0.1" value={temperature} onInput={(event) => setTemperature(event.currentTarget.value)} />
        </label>
        <label>
          Tokens <input type="number" min="1" value={most} onInput={(event) => setMost(event.currentTarget.value)} />
        </label>
        <button
          onClick={() => {
            setMessages([]);
            setAnswers([]);
          }}
        >
          Clear
        </button>
      </div>
      <NotShown count={messages.length - 100} what="earlier messages" />
      {messages.slice(-100).map((message, n) => (
        <MessageView key={n} message={message} />
      ))}
      {answers.length > 0 && (
        <div class={answers.length > 1 ? "compare" : ""} aria-live="polite">
          {answers.map((answer, n) => (
            <section class="card" key={n}>
              <div class="row">
                <b>{oneLine(answer.model, 60)}</b>
                {answer.run && (
                  <ScreenLink to={["run", answer.run]} params={{ mode: "tokens" }}>
                    its tokens
                  </ScreenLink>
                )}
              </div>
              {answer.error ? (
                <p class="error-text">{answer.error}</p>
              ) : (
                (answers.length > 1 || answer.message.tool_calls) && <MessageView message={answer.message} />
              )}
              {answer.message.tool_calls?.map((call) => (
                <pre class="diff" key={call.id}>
                  {oneLine(`${call.function?.name}(${call.function?.arguments})`, 2000)}
                </pre>
              ))}
            </section>
          ))}
        </div>
      )}
      <form class="form" onSubmit={(event) => void send(event)}>
        {problem && (
          <p class="error-text" role="alert">
            {problem}
          </p>
        )}
        <label>
          Message
          <textarea rows={3} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <details>
          <summary>System prompt and tools</summary>
          <label>
            System prompt
            <textarea rows={2} value={system} onInput={(event) => setSystem(event.currentTarget.value)} />
          </label>
          <label>
            Tools, as JSON
            <textarea rows={4} class="mono" value={tools} onInput={(event) => setTools(event.currentTarget.value)} />
          </label>
        </details>
        <div class="row">
          <button class="primary" disabled={busy}>
            {busy ? "Waits for the answer …" : "Send"}
          </button>
          <span class="hint">Answers are recorded with the tag "{TAG}".</span>
        </div>
      </form>
    </>
  );
}

async function ask(model: string, body: object, signal: AbortSignal): Promise<Answer> {
  const nothing: Message = { role: "assistant", content: "" };
  try {
    const response = await request("POST", "/v1/chat/completions", { ...body, model }, signal, "application/json", {
      "x-run-tags": TAG,
    });
    const answer = (await response.json()) as { model: string; choices: { message: Message }[] };
    return { model: answer.model, message: answer.choices[0]?.message ?? nothing, run: response.headers.get("x-run-id") };
  } catch (error) {
    return { model, message: nothing, run: null, error: (error as Error).message };
  }
}
