/** Space and time: a lane a rank, a line a message. Measured times stand under those of the model. */
import { scaleLinear } from "d3-scale";
import type { Film } from "./film";
import type { Timing } from "./timing";
import { seconds } from "./words";

const LEFT = 44;
const BELOW = 30;

export interface Lane {
  timing: Timing;
  title: string;
}

export class Timeline {
  private readonly canvas: HTMLCanvasElement;
  private readonly head: HTMLElement;
  private total = 1;
  private wide = 0;

  constructor(
    private readonly film: Film,
    parent: HTMLElement,
    onScrub: (time: number) => void,
  ) {
    this.canvas = parent.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.head = parent.appendChild(document.createElement("div"));
    this.head.className = "playhead";
    const scrub = (event: PointerEvent): void => {
      const share = (event.offsetX - LEFT) / (this.wide - LEFT - 4);
      onScrub(Math.max(0, Math.min(1, share)) * this.total);
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      scrub(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons > 0) scrub(event);
    });
  }

  /** Draw all; `total` is the time at the right end, so that two schedules have one clock. */
  draw(lanes: Lane[], total: number): void {
    const { worldSize, name } = this.film.scene;
    this.total = total || 1;
    const lane = Math.max(6, Math.min(30, 480 / worldSize));
    const part = worldSize * lane + 24;
    const wide = (this.wide = Math.max(240, this.canvas.parentElement!.clientWidth || 400));
    const high = lanes.length * part + BELOW;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = wide * scale;
    this.canvas.height = high * scale;
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${high}px`;
    this.head.style.height = `${high - BELOW}px`;
    const context = this.canvas.getContext("2d")!;
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (word: string): string => style.getPropertyValue(word);
    const x = scaleLinear([0, this.total], [LEFT, wide - 4]);
    context.font = "14px sans-serif";
    context.textBaseline = "middle";
    lanes.forEach(({ timing, title }, index) => {
      const top = index * part + 22;
      const y = (rank: number): number => top + (rank + 0.5) * lane;
      context.fillStyle = colour("--text");
      context.textAlign = "left";
      const words = `${title}: ${seconds(timing.total)}`;
      context.fillStyle = colour("--paper");
      context.fillRect(LEFT - 2, top - 20, context.measureText(words).width + 8, 18);
      context.fillStyle = colour("--text");
      context.fillText(words, LEFT, top - 11);
      context.textAlign = "right";
      const every = Math.ceil(16 / lane);
      context.strokeStyle = colour("--line");
      for (let rank = 0; rank < worldSize; rank++) {
        if (rank % every === 0) context.fillText(String(rank), LEFT - 6, y(rank));
        context.beginPath();
        context.moveTo(LEFT, y(rank));
        context.lineTo(wide - 4, y(rank));
        context.stroke();
      }
      for (const isReduced of [false, true]) {
        context.strokeStyle = colour(isReduced ? "--add" : "--move");
        context.beginPath();
        this.film.steps.forEach((messages, step) => {
          messages.forEach((message, number) => {
            const [begin, end] = [timing.begin[step]![number]!, timing.end[step]![number]!];
            if (message.isReduced !== isReduced || !Number.isFinite(end)) return;
            context.moveTo(x(begin), y(message.source));
            context.lineTo(x(end), y(message.target));
          });
        });
        context.stroke();
      }
    });
    context.fillStyle = colour("--text");
    for (const mark of total === 0 ? [] : x.ticks(Math.max(2, Math.floor(wide / 140)))) {
      context.textAlign = mark === 0 ? "left" : x(mark) > wide - 40 ? "right" : "center";
      context.fillText(seconds(mark), x(mark), high - 10);
      context.fillRect(x(mark), high - BELOW + 4, 1, 6);
    }
    const said = lanes.map(({ timing, title }) => `${title} ${seconds(timing.total)}`).join(", ");
    this.canvas.setAttribute("aria-label", `Ranks over time of ${name}: ${said}`);
  }

  /** Put the line that says what time it is. */
  point(time: number): void {
    this.head.style.left = `${LEFT + ((this.wide - LEFT - 4) * Math.min(time, this.total)) / this.total}px`;
  }
}
