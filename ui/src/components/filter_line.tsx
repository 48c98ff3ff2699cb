/** Filter line: the line of text that chooses runs; lib/filter.ts has its words. */
import { useEffect, useRef, useState } from "preact/hooks";
import { useKeys } from "../lib/keyboard";

export function FilterLine({ line, setLine }: { line: string; setLine: (text: string) => void }) {
  const [text, setText] = useState(line);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => setText(line), [line]);
  useKeys({ "/": ["filter", () => input.current?.focus()] });
  return (
    <form
      class="filter"
      onSubmit={(event) => {
        event.preventDefault();
        setLine(text.trim());
      }}
    >
      <input
        ref={input}
        class="wide"
        type="search"
        aria-label="Filter"
        placeholder='reward<1 and seconds>60 and "division by zero"'
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
    </form>
  );
}
