/** What each rank holds: a row a rank, a cell a chunk; in a cell a stripe for each rank that contributed. */
import { countOf, type Film } from "./film";

const HEAD = 34; // for the numbers of ranks and chunks

/** Of more ranks a stripe would be thinner than a pixel: a cell is filled as far as ranks have contributed. */
export const FEW_STRIPES = 16;
const RIGHT = 12; // for the last number
const LINED = 12; // the least size of a cell with lines around it: of smaller ones, lines would be all that is seen

/** Colours around the circle of hues, equally light; with few ranks, those that all people can tell apart. */
const FEW = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

export function colourOfRank(rank: number, worldSize: number): string {
  if (worldSize <= FEW.length) return FEW[rank]!;
  return `hsl(${Math.round((360 * rank) / worldSize)} 65% ${rank % 2 ? 45 : 60}%)`;
}

export class Chunks {
  readonly canvas: HTMLCanvasElement;
  /** One pixel a rank, in its colour: stripes are stretched from it. */
  private readonly strip: HTMLCanvasElement;
  private colours = { text: "", cell: "", line: "", bad: "", share: "" };
  /** Steps of each rank that are drawn; -1 before the first time. */
  private drawn: number[] = [];
  private selected = "";
  private size = 0;
  private look = "";

  constructor(
    private readonly film: Film,
    parent: HTMLElement,
    onSelect: (rank: number, chunk: number) => void,
  ) {
    const { worldSize, numChunks, name } = film.scene;
    this.strip = document.createElement("canvas");
    this.strip.width = worldSize;
    this.strip.height = 1;
    const strip = this.strip.getContext("2d")!;
    for (let rank = 0; rank < worldSize; rank++) {
      strip.fillStyle = colourOfRank(rank, worldSize);
      strip.fillRect(rank, 0, 1, 1);
    }
    this.canvas = parent.appendChild(document.createElement("canvas"));
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute(
      "aria-label",
      `What each rank of ${name} holds. Rows are ranks, columns are chunks; the arrow keys choose a cell.`,
    );
    const cellAt = (event: MouseEvent): [number, number] | null => {
      const chunk = Math.floor((event.offsetX - HEAD) / this.size);
      const rank = Math.floor((event.offsetY - HEAD) / this.size);
      return chunk >= 0 && rank >= 0 && chunk < numChunks && rank < worldSize ? [rank, chunk] : null;
    };
    for (const kind of ["pointermove", "pointerdown"] as const) {
      this.canvas.addEventListener(kind, (event) => {
        const cell = cellAt(event);
        if (cell) onSelect(...cell);
      });
    }
    this.canvas.addEventListener("keydown", (event) => {
      const ways: Record<string, [number, number]> = {
        ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      };
      const way = ways[event.key];
      if (way === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      const [rank = -1, chunk = -1] = this.selected === "" ? [] : this.selected.split(" ").map(Number);
      const within = (value: number, count: number): number => Math.max(0, Math.min(count - 1, value));
      onSelect(within(Math.max(rank, 0) + (rank < 0 ? 0 : way[0]), worldSize),
               within(Math.max(chunk, 0) + (chunk < 0 ? 0 : way[1]), numChunks));
    });
  }

  draw(after: number[], rank: number, chunk: number, look: string): void {
    const { worldSize, numChunks } = this.film.scene;
    const room = this.canvas.parentElement!.clientWidth || 400;
    const size = Math.max(6, Math.min(52, Math.floor((room - HEAD - RIGHT) / numChunks)));
    const context = this.canvas.getContext("2d")!;
    const isFresh = size !== this.size || look !== this.look;
    if (isFresh) {
      this.size = size;
      this.look = look;
      const scale = window.devicePixelRatio || 1;
      const [wide, high] = [HEAD + size * numChunks + RIGHT, HEAD + size * worldSize + 2];
      this.canvas.width = wide * scale;
      this.canvas.height = high * scale;
      this.canvas.style.width = `${wide}px`;
      this.canvas.style.height = `${high}px`;
      context.scale(scale, scale);
      context.imageSmoothingEnabled = false;
      const style = getComputedStyle(document.documentElement);
      const colour = (word: string): string => style.getPropertyValue(word);
      this.colours = {
        text: colour("--text"), cell: colour("--cell"), line: colour("--line"), bad: colour("--bad"),
        share: colour("--share"),
      };
      this.drawn = new Array<number>(worldSize).fill(-1);
      this.drawHeads(context, size);
      context.fillStyle = this.colours.cell;
      context.fillRect(HEAD, HEAD, size * numChunks, size * worldSize);
    }
    const all = Array.from({ length: numChunks }, (_, column) => column);
    for (let row = 0; row < worldSize; row++) {
      const [before, now] = [this.drawn[row]!, after[row]!];
      const fresh = (): number[] => (size < LINED ? all.filter((column) => this.film.held(row, column, now) >= 0) : all);
      const columns = before < 0 ? fresh() : this.film.changes(row, before, now);
      for (const column of columns) this.drawCell(context, row, column, now, row === rank && column === chunk);
      this.drawn[row] = now;
    }
    const selected = rank < 0 ? "" : `${rank} ${chunk}`;
    if (selected !== this.selected) {
      for (const cell of [this.selected, selected]) {
        if (cell === "") continue;
        const [row, column] = cell.split(" ").map(Number) as [number, number];
        if (row < worldSize && column < numChunks) this.drawCell(context, row, column, after[row]!, cell === selected);
      }
      this.selected = selected;
    }
  }

  private drawHeads(context: CanvasRenderingContext2D, size: number): void {
    const { worldSize, numChunks } = this.film.scene;
    const every = Math.ceil(18 / size);
    context.fillStyle = this.colours.text;
    context.font = "14px sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let chunk = 0; chunk < numChunks; chunk += every) {
      context.fillText(String(chunk), HEAD + (chunk + 0.5) * size, HEAD - 10);
    }
    context.textAlign = "right";
    for (let rank = 0; rank < worldSize; rank += every) {
      context.fillText(String(rank), HEAD - 6, HEAD + (rank + 0.5) * size);
    }
  }

  private drawCell(context: CanvasRenderingContext2D, row: number, column: number, after: number, isSelected: boolean): void {
    const set = this.film.held(row, column, after);
    const { worldSize, complete } = this.film.scene;
    const size = this.size;
    const [left, top] = [HEAD + column * size, HEAD + row * size];
    context.fillStyle = this.colours.cell;
    context.fillRect(left, top, size, size);
    const inner = size < 10 ? size - 0.5 : size - 2;
    if (worldSize > FEW_STRIPES && complete > 1) {
      const high = set < 0 ? 0 : (inner * countOf(this.film.sets[set]!)) / complete;
      context.fillStyle = this.colours.share;
      context.fillRect(left + (size - inner) / 2, top + (size - inner) / 2 + inner - high, inner, high);
    } else for (const [first, last] of set < 0 ? [] : this.film.sets[set]!) {
      const count = last - first + 1;
      // Alone, a contribution fills the cell; summed, each rank has a stripe of its own.
      const [from, wide] = complete === 1 ? [0, inner] : [first, (inner * count) / worldSize];
      const offset = (inner * from) / worldSize;
      context.drawImage(this.strip, first, 0, count, 1, left + 1 + offset, top + 1, wide, inner);
    }
    if (size < LINED && !isSelected) return;
    context.strokeStyle = isSelected ? this.colours.bad : this.colours.line;
    context.lineWidth = isSelected ? 3 : 1;
    const inset = context.lineWidth / 2;
    context.strokeRect(left + inset, top + inset, size - 2 * inset, size - 2 * inset);
  }
}
