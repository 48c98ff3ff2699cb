/** Word diff: what two texts share and differ in, by words, in bounded time. */

export interface Piece {
  kind: "same" | "left" | "right";
  text: string;
}

const MOST = 1500; // words of each text that are compared; longer ones are compared by lines, then cut

/** Return the pieces of two texts in order, by the longest common subsequence of their words. */
export function diff(left: string, right: string): Piece[] {
  let a = left.match(/\s+|[^\s]+/g) ?? [];
  let b = right.match(/\s+|[^\s]+/g) ?? [];
  if (a.length > MOST || b.length > MOST) {
    a = left.match(/[^\n]*\n|[^\n]+$/g) ?? [];
    b = right.match(/[^\n]*\n|[^\n]+$/g) ?? [];
  }
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const pieces: Piece[] = [];
  const add = (kind: Piece["kind"], text: string) => {
    const last = pieces.at(-1);
    if (!text) return;
    if (last?.kind === kind) last.text += text;
    else pieces.push({ kind, text });
  };
  add("same", a.slice(0, start).join(""));
  const x = a.slice(start, a.length - end);
  const y = b.slice(start, b.length - end);
  if (x.length > MOST || y.length > MOST) {
    add("left", x.join(""));
    add("right", y.join(""));
  } else {
    for (const piece of between(x, y)) add(piece.kind, piece.text);
  }
  add("same", a.slice(a.length - end).join(""));
  return pieces;
}

function between(x: string[], y: string[]): Piece[] {
  const width = y.length + 1;
  const lengths = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      const here = i * width + j;
      lengths[here] =
        x[i] === y[j] ? lengths[here + width + 1]! + 1 : Math.max(lengths[here + width]!, lengths[here + 1]!);
    }
  }
  const pieces: Piece[] = [];
  let i = 0;
  let j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) {
      pieces.push({ kind: "same", text: x[i++]! });
      j++;
    } else if (i < x.length && (j >= y.length || lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!)) {
      pieces.push({ kind: "left", text: x[i++]! });
    } else pieces.push({ kind: "right", text: y[j++]! });
  }
  return pieces;
}
